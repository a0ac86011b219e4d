"""Memory over time, counted again value by value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshwright as mw
from meshwright.graph import trace
from meshwright.planner.planner import Task
from meshwright.planner.reading.readback import Readback
from meshwright.solver.problem.copies import Spans
from meshwright.solver.problem.priced import Profile
from tests.planner.examples import mesh, mlp_step, traced_zoo

MODELS = [("mlp", {"hidden": 64, "layers": 4}), ("llama-tiny", {"checkpoint": True}), ("llama-tiny", {"scan": True})]


@pytest.fixture(scope="module", params=MODELS, ids=str)
def chosen(request):
    """A formulation and some choice on it."""
    name, options = request.param
    formulation = Task(traced_zoo(name, **options), mw.Auto()).formulate(mesh((2, 4)))
    random = np.random.default_rng(0)
    return formulation, np.array([random.integers(len(cost)) for cost in formulation.costs])


def waiting(formulation, choice):
    """The gradients that are reduced, in the order in which they run: that moment, and the group they lead."""
    grouping, found = formulation.grouping, []
    for number, group in enumerate(grouping.groups):
        if group.leader is not None and formulation.live.runs[group.leader] > group.leader:
            which, nest = formulation.folded.group_class[number], grouping.nests[group.leader]
            loops = formulation.tables[which].assignments[0][choice[which]]
            summed = {i for i, loop in enumerate(nest.loops) if loop.kind == "sum"}
            if summed.intersection(loops.tolist()):
                found.append((int(formulation.live.runs[group.leader]), number))
    return sorted(found)


def joinable(formulation):
    """The operations whose sums may be settled together with others', and the last addition until which they wait."""
    grouping, found = formulation.grouping, {}
    for leader, addition in grouping.joining.joins.items():
        for one in (leader, grouping.groups[int(grouping.placed.group[addition])].leader):
            found[one] = max(found.get(one, 0), addition)
    return found


def unsettled(formulation, choice, leader):
    """Bytes of an operation's result on one device before its sums are settled."""
    grouping = formulation.grouping
    which, nest = formulation.folded.group_class[int(grouping.placed.group[leader])], grouping.nests[leader]
    split = formulation.tables[which].assignments[0][choice[which]].tolist()
    kept = {loop for dim in nest.results[0] for loop in dim}
    parts = np.prod([n for n, loop in zip(formulation.mesh.sizes, split, strict=True) if loop in kept])
    return grouping.graph.types[grouping.graph.ops[leader].outputs[0]].num_bytes / parts


def counted(formulation, choice):
    """Bytes at each operation: every stored value while it lives, its copies, and what waiting gradients hold."""
    live, back, grouping = formulation.live, Readback(formulation, choice), formulation.grouping
    graph, late = back.graph, waiting(formulation, choice)
    leaders = {grouping.groups[number].leader for _, number in late}
    total, stop = np.zeros(live.num_steps), live.stop.copy()

    def size(value, code):
        return graph.types[value].num_bytes / float(back.axes.num_parts(code))

    for value in grouping.home:
        if live.stored[value] and live.stop[value] > live.start[value]:
            made = int(graph.columns.producer[value])
            at_once = made >= 0 and grouping.nests[made].flops > 0 and made not in leaders
            total[made if at_once else live.start[value] : live.stop[value]] += size(value, back.code(value))
    for value, start, stopped, share in zip(*(part.tolist() for part in live.copies), strict=True):
        if value in grouping.home and live.stored[value]:
            total[start:stopped] += size(value, back.code(value)) * share
    for time, home in late:
        which = formulation.folded.group_class[home]
        for number, slot in enumerate(grouping.groups[home].slots):
            if slot.member == 0 and stop[slot.value] <= time:
                code = formulation.tables[which].needs[number][choice[which]]
                total[stop[slot.value] : time + 1] += size(slot.value, code)
                stop[slot.value] = time + 1
    for leader, until in joinable(formulation).items():
        value = graph.ops[leader].outputs[0]
        total[leader : until + 1] += unsettled(formulation, choice, leader) - size(value, back.code(value))
    for which, members in enumerate(formulation.folded.members):
        for member, needed in formulation.tables[which].transient:
            for group in members:
                total[grouping.groups[group].ops[member]] += needed[choice[which]]
    return total


def test_a_profile_counts_every_value_once(chosen):
    formulation, choice = chosen
    profile = formulation.memory.profile(choice, Spans.joined([]))
    np.testing.assert_allclose(profile.bytes_at, counted(formulation, choice), rtol=1e-9)
    copies = Spans(np.array([3, 6]), np.array([7, 8]), np.array([100.0, 10.0]))
    with_copies = formulation.memory.profile(choice, copies).bytes_at - profile.bytes_at
    np.testing.assert_allclose(with_copies[:9], [0, 0, 0, 100, 100, 100, 110, 10, 0], atol=1e-3)


def test_what_classes_use_adds_up_to_the_profile(chosen):
    formulation, choice = chosen
    profile = formulation.memory.profile(choice, Spans.joined([]))
    for time in (0, profile.peak_at, len(profile.bytes_at) - 1):
        used = formulation.memory.usage(time, len(choice))
        total = sum(size[choice[which]] for which, size in enumerate(used) if size is not None)
        assert total == pytest.approx(profile.bytes_at[time])


def test_no_choice_takes_less_than_the_least(chosen):
    formulation, choice = chosen
    least, profile = formulation.memory.least(), formulation.memory.profile(choice, Spans.joined([]))
    assert (least.bytes_at <= profile.bytes_at * (1 + 1e-9)).all()


def test_gradients_wait_only_where_they_are_reduced():
    step, args = mlp_step(1024, 8, layers=4)  # activations are all there is
    task = Task(trace(step, *args), mw.DataParallel(), barriers=False)
    alone, spread = (task.plan([mesh((n,))], lambda _: None).details.back for n in (1, 4))
    assert waiting(alone.formulation, alone.choice) == []
    late = waiting(spread.formulation, spread.choice)
    assert len(late) == 4
    # Before the first gradient runs, the inputs of all layers and the gradients of all their results are in memory.
    first, activations = late[0][0], 2 * 4 * 1024 * 8 * 4
    assert alone.profile().bytes_at[first] < activations
    assert spread.profile().bytes_at[first] >= activations / 4


@pytest.mark.parametrize("method", [mw.DataParallel(), mw.Zero(stage=3)], ids=lambda method: method.name)
def test_with_barriers_a_layer_whose_work_is_repeated_keeps_its_input_and_its_state(method):
    """Without them the gradients of all layers wait for one another, and keep what was to be computed again."""
    rows, seq, hidden = 64, 64, 64
    more, weights = {}, {}
    for layers in (3, 6):
        traced = traced_zoo("llama-tiny", layers=layers, checkpoint="full", batch=rows, seq=seq)
        for barriers in (False, True):
            plan = Task(traced, method, barriers=barriers).plan([mesh((4,))], lambda _: None)
            more[barriers] = plan.memory.peak_bytes - more.get(barriers, 0)
            weights[barriers] = sum(plan.memory.argument_bytes.values()) - weights.get(barriers, 0)
    one_input = rows * seq * hidden * 2 / 4  # in bfloat16, on four devices
    assert more[False] / 3 > 8 * one_input + weights[False] / 3
    gradients = weights[True] / 3  # as many bytes as parameters and both moments at most
    assert one_input < more[True] / 3 < 2 * one_input + weights[True] / 3 + gradients


def test_resharded_copies_are_sent_ahead_or_cut_out_where_they_are_read(chosen):
    formulation, choice = chosen
    back, live, expected, kinds = Readback(formulation, choice), formulation.live, [], set()
    products = np.array([nest.flops > 0 for nest in back.grouping.nests])
    for item in back.resharded():
        first, last, is_sent = min(item.readers), max(item.readers), bool(back.hops(item))
        fused = [back.graph.ops[i].primitive.startswith(("reduce_", "arg", "gather", "scatter")) for i in item.readers]
        fused = [one or back.grouping.nests[i].fusible for one, i in zip(fused, item.readers, strict=True)]
        kinds.add((is_sent, all(fused)))
        if is_sent:
            loop = max((begin for begin, end in back.graph.loops if begin <= first < end), default=0)
            before = max(np.flatnonzero(products[:first]).max(initial=0), loop)
            first = min(first, max(before, live.ready[item.value]))
        if is_sent or not all(fused):
            size = back.graph.sizes[item.value] * back.graph.sent_itemsize[item.value]
            expected.append((first, last + 1, size / float(back.axes.num_parts(item.target))))
    found = back.copies()
    assert sorted(zip(*(part.tolist() for part in found), strict=True)) == sorted(expected)
    assert {(True, True), (True, False), (False, True)} <= kinds


def test_an_empty_profile_has_no_peak():
    assert (Profile(np.zeros(0)).peak_bytes, Profile(np.zeros(0)).peak_at) == (0, 0)


def on_cpus(method):
    example = traced_zoo("llama-tiny", batch=32)
    return Task(example, method).plan([mw.cluster("1x8 cpu").mesh((2, 4))], lambda _: None)


def test_on_cpus_a_plan_keeps_its_limit():
    free = on_cpus(mw.Auto())
    share = 0.8 * free.memory.peak_bytes / free.mesh.memory_bytes
    tight = on_cpus(mw.Auto(memory_fraction=share))
    assert tight.memory.peak_bytes <= tight.memory.limit_bytes < free.memory.peak_bytes
    assert tight.cost.total >= free.cost.total


def test_on_cpus_all_gradients_wait():
    """Also those that are not reduced; what they read is in memory until the backward pass is over."""
    step, args = mlp_step(1024, 8, layers=4)
    task = Task(trace(step, *args), mw.DataParallel(), barriers=False)
    held = {}
    for where in ("1x1 cpu", "1x1 h100"):
        back = task.plan([mw.cluster(where).mesh((1,))], lambda _: None).details.back
        runs = np.flatnonzero(task.live.runs > np.arange(len(task.live.runs)))
        held[where] = back.profile().bytes_at[task.live.runs[runs].min()]
    activations = 2 * 4 * 1024 * 8 * 4  # the inputs of all layers and the gradients of all their results
    assert held["1x1 h100"] < activations <= held["1x1 cpu"]


def test_on_cpus_operations_without_a_kernel_take_memory_while_they_run():
    def pooled(x):
        return jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2)

    def ragged(x, w, sizes):
        return lax.ragged_dot(x, w, sizes)

    images = jax.ShapeDtypeStruct((16, 8, 8, 4), jnp.float32)
    rows, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32), (4, 32, 8)))
    groups = jax.ShapeDtypeStruct((4,), jnp.int32)
    for function, args, taken in (
        (jax.grad(pooled), (images,), 4 * 4 * 16 * 8 * 8 * 4),  # an index of 4 bytes along each of 4 dims
        (ragged, (rows, weights, groups), 4 * 64 * 32 * 4),  # all rows for each of 4 groups
    ):
        task = Task(trace(function, *args), mw.Auto())
        cpu, gpu = (task.formulate(mw.cluster(f"1x1 {chip}").mesh((1,))).memory for chip in ("cpu", "h100"))
        choice = np.zeros(len(task.folded.members) + len(task.folded.shared_members), np.int64)
        more = cpu.profile(choice, Spans.joined([])).bytes_at - gpu.profile(choice, Spans.joined([])).bytes_at
        assert more.max() == taken and (more > 0).sum() == 1


@pytest.mark.parametrize("cluster", ["local", "1x4 a100-40gb"])
def test_a_loop_adds_up_products_of_vectors(cluster):
    """Each is made by its readers, and belongs to no group."""

    def loss(w, xs):
        def cell(h, x):
            h = jnp.tanh(w @ h + x)
            return h, h

        return lax.scan(cell, jnp.zeros(8), xs)[1].sum()

    w, xs = (jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (8, 5))
    plan = mw.plan(jax.grad(loss), w, xs, cluster=cluster)
    assert plan.memory.peak_bytes >= sum(plan.memory.argument_bytes.values())
