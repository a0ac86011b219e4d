"""Plans in stages through the public door: what they hold, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.runtime.spmd import spmd
from tests.pipeline.models import mlp

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def planned():
    step, args = mlp(1024, layers=4, rows=16)
    recipe = mw.ThreeD(data=2, tensor=2, pipeline=2, microbatch=2, checkpoint="selective")
    return mw.plan(step, *args, cluster="2x4 h100", method=recipe), step, args


def test_a_recipe_is_laid_out_as_it_says(planned):
    plan, _, _ = planned
    assert [s.layers for s in plan.stages] == [(0, 2), (2, 4)]
    assert [s.mesh.sizes for s in plan.stages] == [(2, 2), (2, 2)]
    assert [(s.submesh.first_host, s.submesh.num_devices) for s in plan.stages] == [(0, 4), (1, 4)]
    assert plan.pipeline.num_microbatches == 4
    assert plan.method == "ThreeD(2×2×2)"
    paths = [{t.path for t in s.tensors} for s in plan.stages]
    assert paths == [{"state/0/0", "state/0/1"}, {"state/0/2", "state/0/3"}]
    assert all("y" in axes for s in plan.stages for t in s.tensors for axes in t.spec if axes)
    assert plan.memory.peak_bytes == max(s.peak_bytes for s in plan.stages)
    assert plan.stages[0].send_bytes > 0 and plan.stages[-1].send_bytes == 0


def test_it_is_saved_printed_and_not_run_as_one_program(planned, tmp_path):
    plan, step, _ = planned
    plan.save(tmp_path / "plan.json")
    again = mw.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.stages == plan.stages
    text = str(again)
    assert "2 stages, 1f1b, 4 microbatches" in text and "host 1/0-3" in text
    with pytest.raises(mw.ShardingError, match="pipeline of 2 stages, which are several programs"):
        spmd(plan, step)


def test_auto_takes_the_plan_without_stages_where_that_is_quicker():
    step, args = mlp(256, layers=4, rows=16)
    plan = mw.plan(step, *args, cluster="1x2 h100", method=mw.Auto(pipeline=True))
    plain = mw.plan(step, *args, cluster="1x2 h100")
    assert plan.step_s <= plain.step_s
    assert plan.method == "Auto"


def test_a_single_stage_with_a_single_microbatch_is_a_plan_without_stages():
    """Their costs are the same sums in another order; one of them can be run."""
    for hidden, rows in ((256, 8), (384, 64), (512, 24)):
        step, args = mlp(hidden, layers=3, rows=rows)
        plan = mw.plan(step, *args, cluster="1x2 h100", method=mw.Auto(pipeline=True))
        assert len(plan.stages) != 1 or plan.pipeline.num_microbatches > 1


def test_hosts_of_two_kinds_get_stages_of_their_own():
    step, args = mlp(4096, layers=8, rows=64)
    method = mw.Auto(pipeline=True, memory_fraction=0.006)  # more than one kind of hosts has by itself
    plan = mw.plan(step, *args, cluster="1x2 h100 + 1x2 v100-16gb", method=method)
    assert "idle" not in plan.provenance
    work = {
        chip: sum(s.layers[1] - s.layers[0] for s in plan.stages if chip in s.submesh.chip) for chip in ("h1", "v1")
    }
    assert sum(s.submesh.num_devices for s in plan.stages) == 4
    assert sum(work.values()) == 8
    assert work["h1"] > work["v1"] > 0  # the faster chip has more to do


def test_slow_hosts_are_left_idle_where_that_is_quicker():
    machines = "1x1 v100-16gb + 1x2 h100 + 1x1 v100-16gb"
    step, args = mlp(4096, layers=4, rows=64)
    plan = mw.plan(step, *args, cluster=machines, method=mw.Auto(pipeline=True))
    alone = mw.plan(step, *args, cluster="1x2 h100", method=mw.Auto(pipeline=True))
    assert plan.step_s == pytest.approx(alone.step_s)
    assert "v100-16gb: quicker without" in plan.provenance["idle"]
    assert plan.mesh.cluster.name == "1x2 h100"
    assert plan.simulate().step_s == pytest.approx(alone.simulate().step_s)
    assert plan.solution.lower_bound <= plan.step_s


def test_hosts_of_several_kinds_are_no_slower_than_any_of_them():
    step, args = mlp(1024, layers=3, rows=24)
    kinds = ("2x1 h100", "1x2 a100-40gb", "1x1 l40s")
    plan = mw.plan(step, *args, cluster=" + ".join(kinds), method=mw.Auto(pipeline=True))
    for some in (*kinds, f"{kinds[0]} + {kinds[1]}"):
        part = mw.plan(step, *args, cluster=some, method=mw.Auto(pipeline=True))
        assert plan.step_s <= part.step_s * (1 + 1e-9)


def test_hosts_of_two_kinds_that_are_too_small_say_by_how_much():
    step, args = mlp(4096, layers=8, rows=16)
    method = mw.Auto(pipeline=True, memory_fraction=0.002)
    with pytest.raises(mw.DoesNotFit, match=r"the nearest, of \d stages with checkpoint=\w+, needs") as caught:
        mw.plan(step, *args, cluster="1x2 h100 + 1x2 v100-16gb", method=method)
    assert caught.value.needed_bytes > caught.value.limit_bytes


def test_a_scan_is_cut_between_its_trips():
    example = zoo.build("llama-tiny", batch=8, layers=4, scan=True)
    recipe = mw.ThreeD(data=1, tensor=1, pipeline=2, microbatch=1)
    plan = mw.plan(example.train_step, example.state, example.batch, cluster="1x2 h100", method=recipe)
    stacked = {t.path: t.shape[0] for s in plan.stages for t in s.tensors if t.path.endswith("layers/up")}
    assert set(stacked.values()) == {2}  # two of the four layers on each stage


def test_a_forward_pass_is_pipelined_for_inference():
    example = zoo.build("llama-tiny", batch=8, layers=4)
    args = (example.loss, example.state["params"], example.batch)
    recipe = mw.ThreeD(data=1, tensor=1, pipeline=2, microbatch=2, schedule="inference")
    plan = mw.plan(*args, cluster="1x2 h100", method=recipe)
    assert all(s.backward.total_s == 0 and s.update.total_s == 0 for s in plan.stages)
    with pytest.raises(mw.ShardingError, match="takes no gradient"):
        mw.plan(*args, cluster="1x2 h100", method=mw.ThreeD(data=1, tensor=1, pipeline=2))


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"data": 4, "pipeline": 2, "boundaries": 5}, "boundaries is 5; give globs of name scopes"),
        ({"data": 4, "pipeline": 2, "layers": True}, "layers is True; give a whole number"),
        ({"pipeline": 8}, "8 chunks, but the model has 4 layers; use at most 4"),
        ({"data": 2, "pipeline": 4, "microbatch": 3}, "does not divide into microbatches of 6"),
        ({"data": 2}, "is 2 devices, but cluster '2x4 h100' has 8"),
        ({"data": 4, "pipeline": 2, "microbatch": 2, "schedule": "inference"}, "takes a gradient"),
        ({"data": 4, "pipeline": 2, "microbatch": 4, "interleave": 2, "schedule": "gpipe"}, "no interleaved form"),
    ],
)
def test_recipes_that_do_not_suit_are_refused(recipe, words):
    step, args = mlp(64, layers=4, rows=16)
    with pytest.raises(mw.ShardingError, match=words):
        mw.plan(step, *args, cluster="2x4 h100", method=mw.ThreeD(**recipe))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mw.ThreeD(data=0), "ThreeD data is 0; give a whole number of at least 1"),
        (lambda: mw.ThreeD(schedule="2f2b"), "unknown schedule '2f2b'"),
        (lambda: mw.ThreeD(schedule=["1f1b"]), r"unknown schedule \['1f1b'\]"),
        (lambda: mw.ThreeD(memory_fraction="all"), "memory_fraction is 'all'; give a fraction"),
        (lambda: mw.ThreeD(checkpoint="some"), "choose one of none, selective, full"),
        (lambda: mw.Auto(layers=3), "add pipeline=True"),
        (lambda: mw.Auto(fix={"x": ("x",)}, pipeline=True), "describe one mesh"),
    ],
)
def test_methods_are_checked_when_they_are_made(make, words):
    with pytest.raises(mw.ShardingError, match=words):
        make()


def test_a_mesh_is_not_for_pipelines_and_a_mixed_cluster_not_for_meshes():
    function, x = (lambda x, w: x @ w), jnp.ones((8, 8))
    with pytest.raises(mw.ShardingError, match="give a cluster, and leave mesh out"):
        mw.plan(function, x, x, cluster="2x4 h100", mesh=(2, 4), method=mw.Auto(pipeline=True))
    with pytest.raises(mw.ClusterError, match=r"hosts of several kinds.*pipeline=True"):
        mw.plan(function, x, x, cluster="2x4 h100 + 1x4 a100")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("machines", "fraction"), [("2x4 h100", 8e-5), ("1x6 l40s", 1e-4), ("1x2 h100 + 1x4 a100-40gb", 5e-5)]
)
def test_every_device_belongs_to_one_stage(monkeypatch, machines, fraction):
    monkeypatch.setattr("meshwright.pipeline.planner._plain", lambda *_: None)  # which may be quicker
    cluster = mw.cluster(machines)
    hosts = [group.devices_per_host for group in cluster.groups for _ in range(group.num_hosts)]
    step, args = mlp(512, layers=5, rows=24)
    plan = mw.plan(step, *args, cluster=cluster, method=mw.Auto(pipeline=True, memory_fraction=fraction))
    taken = []
    for stage in plan.stages:
        place = stage.submesh
        assert place.num_devices == stage.mesh.num_devices
        for host in range(place.first_host, place.first_host + place.num_hosts):
            taken += [(host, place.first_device + i) for i in range(place.devices_per_host)]
    assert len(plan.stages) > 1
    assert sorted(taken) == [(host, i) for host, number in enumerate(hosts) for i in range(number)]
    assert [s.layers[0] for s in plan.stages[1:]] == [s.layers[1] for s in plan.stages[:-1]]


def test_when_the_time_is_over_the_best_pipeline_so_far_stands_and_nothing_is_proven_of_others(monkeypatch):
    monkeypatch.setattr("meshwright.pipeline.planner._plain", lambda *_: None)
    step, args = mlp(512, layers=5, rows=24)
    tried, plans = [], []
    for seconds in (None, 1e-6):
        method = mw.Auto(pipeline=True, memory_fraction=1e-4, seconds=seconds)
        plans.append(mw.plan(step, *args, cluster="2x4 h100", method=method))
        tried.append(int(plans[-1].provenance["stages"].split()[-3]))
    whole, hasty = plans
    assert tried[1] < tried[0]
    assert hasty.stages and hasty.step_s >= whole.step_s
    assert hasty.solution.lower_bound == 0.0 < whole.solution.lower_bound
    assert hasty.solution.gap == np.inf and hasty.solution.status == "feasible"
