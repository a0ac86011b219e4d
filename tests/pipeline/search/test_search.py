"""The search: no worse than any recipe or plain plan, and its price is what the stages say."""

import itertools

import numpy as np
import pytest

import meshwright as mw
from meshwright.errors import DoesNotFit, ShardingError
from meshwright.graph import trace
from meshwright.pipeline.planner import start_search
from meshwright.pipeline.prices.kernels import GRADIENTS, MICROBATCH, ONCE
from meshwright.pipeline.search.device_line import neighbours, orders, place
from meshwright.pipeline.search.equal_stages import choose
from meshwright.pipeline.search.refine import refine
from meshwright.pipeline.search.search import PipelineSearch
from meshwright.schedules import SCHEDULES, in_flight
from tests.pipeline.models import mlp

pytestmark = pytest.mark.slow


def searched(step, args, machines, **options):
    search = start_search(trace(step, *args), mw.cluster(machines), mw.Auto(pipeline=True, **options), lambda _: None)
    search.all_recipes()
    search.all_programmes()
    return search


def recipes(search):
    """Every recipe that suits a cluster, on the same prices."""
    cluster, catalogue = search.catalogue.cluster, search.catalogue
    number = cluster.num_devices
    shapes = [s for s in itertools.product(range(1, number + 1), repeat=3) if np.prod(s) == number]
    for (data, tensor, pipeline), rows, schedule, chunks, checkpoint in itertools.product(
        shapes, (1, 2, 4, 8), ("gpipe", "1f1b", "zb-h1"), (1, 2), ("none", "selective", "full")
    ):
        recipe = mw.ThreeD(data, tensor, pipeline, rows, schedule, chunks, checkpoint)
        other = PipelineSearch(catalogue, search.flow, lambda _: None)
        try:
            other.one_recipe(recipe)
        except ShardingError:
            continue
        if other.best is not None:
            yield recipe, other.best


@pytest.mark.parametrize(
    ("hidden", "machines", "fraction"),
    [(1024, "2x2 v100-16gb", 0.9), (2048, "1x4 a100-40gb", 0.006), (2048, "2x2 h100", 0.003)],
)
def test_it_is_never_worse_than_a_recipe(hidden, machines, fraction):
    search = searched(*mlp(hidden, layers=4, rows=16), machines, memory_fraction=fraction)
    found = list(recipes(search))
    assert len(found) > 20
    assert search.best_s <= min(best.total_s for _, best in found) * (1 + 1e-9)
    assert 0.2 * search.best_s < search.bound_s <= search.best_s


def test_memory_decides_what_is_computed_again_and_how_many_stages_there_are():
    step, args = mlp(256, layers=6, rows=2**17)
    free = searched(step, args, "1x4 h100")
    peak = max(_peak(free.best, i) for i in range(len(free.best.stages)))
    limit = free.catalogue.limits[0] / 0.9
    tight = searched(step, args, "1x4 h100", memory_fraction=0.5 * peak / limit)
    assert tight.best.total_s > free.best.total_s
    assert max(_peak(tight.best, i) for i in range(len(tight.best.stages))) <= 0.5 * peak
    with pytest.raises(DoesNotFit, match=r"no pipeline fits .* the nearest, pipeline=\d"):
        search = searched(step, args, "1x4 h100", memory_fraction=1e-4 * peak / limit)
        assert search.best is None
        raise search.does_not_fit()


def _peak(found, number):
    stage = found.stages[number]
    ranges = [stage.option.prices.items[:, a:b].sum(axis=1) for a, b in stage.chunks]
    items = sum(ranges)
    transient = max(stage.option.transient[a:b].max() for a, b in stage.chunks)
    return stage.option.state_bytes(items) + transient + stage.in_flight * stage.option.held(items)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("rows", "machines", "fraction"), [(4096, "2x2 h100", 1.2e-4), (24, "1x2 h100 + 1x4 a100-40gb", 5e-5)]
)
def test_the_price_is_what_the_stages_say(rows, machines, fraction):
    """With so little memory that a pipeline is quicker than one program."""
    step, args = mlp(512, layers=5, rows=rows)
    search = searched(step, args, machines, memory_fraction=fraction)
    refine(search)
    plan = mw.plan(step, *args, cluster=machines, method=mw.Auto(pipeline=True, memory_fraction=fraction))
    assert len(plan.stages) > 1
    assert plan.cost.total == pytest.approx(search.best_s)
    assert repriced(plan) == pytest.approx(plan.cost.total)


@pytest.mark.parametrize(("schedule", "interleave"), [("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-h1", 1)])
def test_a_recipe_is_priced_by_its_stages(schedule, interleave):
    step, args = mlp(1024, layers=5, rows=32)
    recipe = mw.ThreeD(data=2, pipeline=2, microbatch=2, schedule=schedule, interleave=interleave, checkpoint="full")
    plan = mw.plan(step, *args, cluster="2x2 h100", method=recipe)
    assert repriced(plan) == pytest.approx(plan.cost.total)
    held = in_flight(schedule, 2, 8, interleave)
    batch = (32 * 1024 * 4 / recipe.data, 0)  # the first stage reads it
    for stage, number, data in zip(plan.stages, held, batch, strict=True):
        needed = stage.state_bytes + data + stage.transient_bytes + stage.activation_bytes * number / interleave
        assert stage.peak_bytes == pytest.approx(needed, abs=4)


def repriced(plan):
    """The time of a step by the formula of `pipeline.stages`, from what the plan says of its stages."""
    pipeline, fill, busy = plan.pipeline, [], []
    name = "interleaved" if pipeline.interleave > 1 else pipeline.schedule
    for stage in plan.stages:
        own, sent = stage.microbatch_s, 2 * stage.transfer_s * pipeline.interleave
        backward = stage.backward.total_s + stage.recompute.total_s
        weights = stage.weights_fraction * stage.backward.compute_s
        weights = min(weights, stage.forward.total_s, backward - weights)
        hides = pipeline.num_microbatches >= SCHEDULES[name].full_from * len(plan.stages)
        part = SCHEDULES[name].fill(own, 0.0, weights, pipeline.interleave) if hides else own
        fill.append(part + sent / pipeline.interleave)
        busy.append((pipeline.num_microbatches - 1) * max(own, sent) + own - part + stage.once_s)
    return sum(fill) + max(busy)


def test_depth_needs_no_more_solves():
    shallow, deep = (searched(*mlp(128, layers=n, rows=8), "2x2 h100") for n in (4, 12))
    assert deep.num_layers == 12
    assert deep.catalogue.num_solves == shallow.catalogue.num_solves


def test_stages_on_one_host_send_inside_it():
    """Four stages of two devices on two hosts: the second sends over the network, the others do not."""
    step, args = mlp(1024, layers=4, rows=16)
    plan = mw.plan(step, *args, cluster="2x4 h100", method=mw.ThreeD(data=2, pipeline=4, microbatch=2))
    inside, across, again, last = (s.transfer_s for s in plan.stages)
    assert inside == again < across and last == 0
    assert [s.send_bytes for s in plan.stages[:3]] == [plan.stages[0].send_bytes] * 3
    assert repriced(plan) == pytest.approx(plan.cost.total)


@pytest.mark.parametrize("machines", ["2x4 h100", "3x2 a100-40gb + 1x4 h100", "4x1 h100"])
def test_every_stage_has_devices_of_its_own_and_knows_its_neighbours(machines):
    cluster, rng = mw.cluster(machines), np.random.default_rng(0)
    for _ in range(50):
        sizes = []
        for number, group in enumerate(cluster.groups):
            left = group.num_devices
            while left:
                fits = [n for n in (1, 2, group.devices_per_host) if n <= left and group.devices_per_host % n == 0]
                sizes.append((number, int(rng.choice(fits))))
                left -= sizes[-1][1]
        order = rng.permutation(len(sizes))
        sizes = [sizes[i] for i in order]
        places = place(cluster, sizes)
        taken = [(p.first_host, p.first_device + i) for p in places for i in range(p.devices_per_host)]
        assert len(set(taken)) == len(taken) == cluster.num_devices
        near = neighbours(places)
        for i, one in enumerate(places):
            other = places[(i + 1) % len(places)]
            assert near[i] == (one.first_host == other.first_host)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("machines", ["2x2 h100", "1x6 l40s", "1x2 h100 + 2x2 a100-40gb"])
def test_no_pipeline_is_quicker_than_the_bound(machines):
    """Not with memory without end either, whatever the microbatch, the schedule and the recomputation."""
    step, args = mlp(512, layers=5, rows=24)
    search = searched(step, args, machines)
    cluster = search.catalogue.cluster
    search.catalogue.limits[:] = [1e18] * len(cluster.groups)
    for number in search.catalogue.microbatches:
        for checkpoint, schedule in itertools.product(search.checkpoints, ("1f1b", "zb-h1")):
            other = PipelineSearch(search.catalogue, search.flow, lambda _: None)
            for order in orders(len(cluster.groups)):
                other._programme(number, checkpoint, schedule, order)
            if other.best is not None:
                assert other.best_s >= other.bound_s * (1 - 1e-9) >= search.bound_s * (1 - 1e-9) ** 2
    plan = mw.plan(step, *args, cluster=machines, method=mw.Auto(pipeline=True))
    assert plan.solution.lower_bound <= plan.cost.total * (1 + 1e-9)
    assert 0 <= plan.solution.gap < 1


@pytest.mark.sweep(2)
@pytest.mark.parametrize("machines", ["1x8 h100", "3x5 a100-80gb", "4x1 l40s", "2x4 v100-16gb", "4x2 h100"])
def test_auto_is_never_worse_than_recipes_of_any_kind(machines):
    """Random models, batches and memories; recipes that split weights over several hosts, and that spread state."""
    rng, cluster = np.random.default_rng(list(machines.encode())), mw.cluster(machines)
    hidden, layers = int(rng.choice([64, 512, 1920])), int(rng.integers(2, 6))
    step, args = mlp(hidden, layers=layers, rows=int(rng.choice([12, 30, 64])))
    whole = 4 * layers * hidden**2
    fraction = min(0.9, float(rng.choice([0.4, 1, 4, 1e9])) * whole / cluster.memory_bytes)
    search = searched(step, args, machines, memory_fraction=fraction)
    found = list(recipes(search))
    for recipe, best in found:
        assert search.best_s <= best.total_s * (1 + 1e-9), recipe
    if search.best is not None:
        assert search.bound_s <= search.best_s * (1 + 1e-9)


@pytest.mark.parametrize("machines", ["1x2 h100 + 1x2 a100-40gb", "2x2 a100-40gb + 1x3 h100"])
def test_on_hosts_of_two_kinds_auto_is_no_worse_than_a_part_of_them_could_be(machines):
    """One stage on each kind, cut anywhere, any option of each: the least that could be laid down by hand."""
    step, args = mlp(1024, layers=4, rows=12)
    search = searched(step, args, machines)
    groups = search.catalogue.cluster.groups
    for rows in search.catalogue.microbatches:
        count = search.catalogue.rows.batch // rows
        options = [search.options(g, group.num_devices, rows, "none") for g, group in enumerate(groups)]
        if None in options:
            continue
        for cut, order in itertools.product(range(1, 4), ((0, 1), (1, 0))):
            sums = [options[g].sums[:, MICROBATCH] for g in order]
            own = [sums[0][:, cut].min(), (sums[1][:, -1] - sums[1][:, cut]).min()]
            once = max(options[g].sums[:, ONCE, -1].max() + _exchanged(options[g]) for g in order)
            sent = max(options[g].transfer(near=False).max() for g in order)
            assert search.best_s <= sum(own) + (count - 1) * max(*own, sent) + sent + once


def _exchanged(options):
    """Seconds of the slowest exchange of all gradients."""
    sizes = options.sums[:, GRADIENTS, -1]
    ways = np.where(np.isfinite(options.ways), options.ways, 0.0)
    return (ways[..., 0] + ways[..., 1] * sizes[:, None, None]).max(axis=2).sum(axis=1).max()


def test_the_options_of_equal_stages_are_best_for_all_together():
    rng = np.random.default_rng(3)
    for _ in range(300):
        count, stages = rng.integers(1, 5), rng.integers(1, 5)
        adds, rest = rng.integers(1, 9, (2, count, stages)).astype(float)
        lost = rng.random((count, stages)) < 0.2
        lost[0] = False
        adds[lost] = rest[lost] = np.inf
        every = itertools.product(range(count), repeat=stages)
        totals = [adds[list(o), range(stages)].sum() + rest[list(o), range(stages)].max() for o in every]
        option = choose(adds, rest)
        assert adds[option, range(stages)].sum() + rest[option, range(stages)].max() == min(totals)
