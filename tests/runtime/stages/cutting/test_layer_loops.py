"""Loops over layers are cut anywhere: unequal stages, interleaved chunks, stacks with their optimizer state."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.graph import trace
from meshwright.program.program import UNPLANNED
from meshwright.runtime.microbatches.cut_operations import Cut
from meshwright.runtime.microbatches.cut_step import CutStep
from meshwright.runtime.microbatches.part_loop import in_loop
from meshwright.runtime.stages.cutting.assignment import assign
from meshwright.runtime.stages.cutting.layer_loops import split_layers
from meshwright.runtime.stages.cutting.layer_stack import LayerStack, StackSharding
from meshwright.runtime.stages.lowering.layout import fitted
from tests.runtime.stages.models import compared, waves
from tests.runtime.stages.scanned import build, recut, with_sums

pytestmark = pytest.mark.devices


@pytest.fixture(autouse=True)
def wide():
    """Float64, so that rounding is no excuse."""
    with jax.enable_x64(True):
        yield


def _check_ids(whole, split, count):
    """What has an id of the plan is the operation of that id, or a piece of it; each loop over layers is in pieces."""
    names = {one.id: one.name for one in whole.operations}
    kept = [one for one in split.operations if one.id < UNPLANNED]
    assert {one.id for one in kept} == names.keys()
    assert all(one.name == names[one.id] for one in kept)
    loops = [one for one in kept if one.name == "scan"]
    assert len(loops) == count * sum(name == "scan" for name in names.values())
    bodies = {one.id: one.regions for one in whole.operations}
    assert all(one.regions is bodies[one.id] for one in loops)


def cuts(draw, layers, count):
    """Numbers of layers of some virtual stages; the head is one more layer, of the last."""
    ends = sorted(draw.sample(range(1, layers), count - 1))
    return [b - a for a, b in zip([0, *ends], [*ends, layers + 1], strict=True)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_split_step_computes_what_the_step_computes(checkpoint):
    draw = random.Random(f"loops {checkpoint}")
    layers = draw.randint(5, 9)
    init, train_step, batch = build(layers, checkpoint)
    state = jax.jit(init)(jax.random.key(0))
    traced = trace(train_step, state, batch)
    leaves, expected = jax.tree.leaves((state, batch)), jax.tree.leaves(jax.jit(train_step)(state, batch))
    for chunks, stages in ((1, 4), (2, 2)):
        recipe = mw.ThreeD(pipeline=stages, microbatch=2, interleave=chunks)
        plan = mw.plan(train_step, state, batch, cluster=f"1x{stages} cpu", method=recipe)
        plan = recut(plan, cuts(draw, layers, chunks * stages))
        assignment = assign(plan, traced.graph, traced.call.program)
        split, parts = split_layers(traced.call.program, assignment), assignment.stacked
        given = [leaves[i] if k < 0 else leaves[i][slice(*parts[i][k][1:])] for i, k in split.leaves]
        examples = [not split.assignment.paths[i].startswith("state") for i in range(len(given))]
        assert any(examples) and not all(examples)
        cut = CutStep(split.program, examples, Cut(2, 1))  # passes can be put together: microbatches of a split loop
        made = jax.jit(split.program.run)(given)
        for value, in_parts in zip(made, jax.jit(in_loop(cut).program.run)(given), strict=True):
            np.testing.assert_allclose(in_parts, value, atol=1e-12)
        _check_ids(traced.call.program, split.program, chunks * stages)
        found = {}
        for (place, _), array in zip(split.results, made, strict=True):
            found.setdefault(place, []).append(array)
        stacked = sum(len(arrays) == chunks * stages for arrays in found.values())
        assert stacked == 6  # weights and biases, and two moments of each
        for place, value in enumerate(expected):
            pieces = found[place]
            np.testing.assert_allclose(np.concatenate(pieces) if len(pieces) > 1 else pieces[0], value, atol=1e-12)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("sizes", "recipe"),
    [
        ((4, 2), mw.ThreeD(pipeline=2, data=2, tensor=2, microbatch=4, checkpoint="selective")),
        ((1, 1, 2, 2), mw.ThreeD(pipeline=2, microbatch=2, interleave=2)),
        ((2, 3, 1), mw.ThreeD(pipeline=3, microbatch=2, schedule="zb-h1", checkpoint="full")),  # the head by itself
    ],
    ids=lambda given: str(given) if isinstance(given, tuple) else given.name,
)
def test_stages_of_any_number_of_layers_compute_what_one_device_computes(sizes, recipe):
    init, train_step, batch = build(5, checkpoint=recipe.interleave == 1)
    devices = recipe.data * recipe.tensor * recipe.pipeline
    state = jax.eval_shape(init, jax.random.key(0))
    plan = mw.plan(train_step, state, batch, cluster=f"1x{devices} cpu", method=recipe)
    worst, step = compared(init, train_step, batch, recut(plan, sizes), cluster=f"1x{devices} cpu")
    assert worst < 1e-12
    stacks = [s for s in step.recent.shardings if isinstance(s, StackSharding)]
    held = [n for n in (*sizes[:-1], sizes[-1] - 1) if n]
    assert len(stacks) == 6 and all([b - a for a, b in stack.bounds] == held for stack in stacks)


def test_stages_on_different_numbers_of_devices_share_a_stack():
    init, train_step, batch = build(5)
    recipe, state = mw.ThreeD(pipeline=2, data=2, microbatch=2), jax.eval_shape(init, jax.random.key(0))
    plan = recut(mw.plan(train_step, state, batch, cluster="1x4 cpu", method=recipe), (4, 2))
    first, last = plan.stages
    one = replace(last.submesh, devices_per_host=1)
    last = replace(last, submesh=one, mesh=last.mesh.cluster.part(1, 1).mesh((1, 1)))
    worst, step = compared(init, train_step, batch, replace(plan, stages=(first, last)), steps=1, cluster="1x4 cpu")
    assert worst < 1e-12
    stacks = [s for s in step.recent.shardings if isinstance(s, StackSharding)]
    assert [[len(piece.device_set) for piece in stack.pieces] for stack in stacks] == [[2, 1]] * 6


def test_stacks_in_unequal_pieces_are_saved_and_restored_like_any_array(tmp_path):
    init, train_step, batch = build(5)
    step = mw.parallelize(train_step, cluster="1x2 cpu", method=mw.ThreeD(pipeline=2, microbatch=4))
    state = mw.create_state(init, jax.random.key(0), like=step, example=(batch,))
    weights, expected = state["params"]["blocks"]["w"], jax.jit(init)(jax.random.key(0))
    assert isinstance(weights, LayerStack) and [piece.shape[0] for piece in weights.pieces] == [3, 2]
    assert [{d.id for d in piece.sharding.device_set} for piece in weights.pieces] == [{0}, {1}]
    assert repr(weights) == "<LayerStack: float64[5, 4, 4], layers 3 + 2>"
    whole = mw.parallelize(train_step, cluster="1x8 cpu", method="data")
    whole.plan(expected, batch)
    mw.save(tmp_path / "staged", 1, state)
    other = mw.restore(tmp_path / "staged", like=whole)
    mw.save(tmp_path / "whole", 1, other)
    again = mw.restore(tmp_path / "whole", like=step)
    assert again["params"]["blocks"]["w"].sharding == weights.sharding
    for values in zip(*map(jax.tree.leaves, (expected, state, other, again)), strict=True):
        for value in values[1:]:
            np.testing.assert_array_equal(values[0], value)
    first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    np.testing.assert_array_equal(mw.reshard(weights, first), np.asarray(weights))
    for found, value in zip(
        *map(jax.tree.leaves, (whole(state, batch), jax.jit(train_step)(expected, batch))), strict=True
    ):
        np.testing.assert_allclose(found, value, atol=1e-12)


def test_a_stage_has_a_single_number_of_each_layer_and_others_read_it():
    def train_step(state, x):
        def loss(params):
            return (jax.lax.scan(lambda x, w: (x + w[1] * jnp.tanh(x @ w[0]), None), x, params)[0] ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(state["params"])
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)
        return {"params": new, "count": state["count"] + 1}, (value, state["params"][1] * 2, state["count"] + 2)

    params = jnp.sin(jnp.arange(4 * 36.0)).reshape(4, 6, 6) / 2, jnp.arange(1.0, 5)
    given = {"params": params, "count": jnp.zeros(4)}, jnp.cos(jnp.arange(48.0)).reshape(8, 6)
    expected = jax.jit(train_step)(*given)
    for recipe in (mw.ThreeD(pipeline=4, microbatch=1), mw.ThreeD(pipeline=4, data=2, microbatch=4, schedule="zb-h1")):
        step = mw.parallelize(train_step, cluster=f"1x{4 * recipe.data} cpu", method=recipe)
        for value, found in zip(*map(jax.tree.leaves, (expected, step(*given))), strict=True):
            np.testing.assert_allclose(found, value, atol=1e-12)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "recipe",
    [
        mw.ThreeD(pipeline=2, microbatch=8),
        mw.ThreeD(pipeline=2, tensor=2, microbatch=2, schedule="gpipe", checkpoint="full"),
        mw.ThreeD(pipeline=2, microbatch=4, interleave=2),
        mw.ThreeD(pipeline=4, data=2, microbatch=2, schedule="zb-h1"),
    ],
    ids=lambda recipe: f"{recipe.schedule} {recipe.interleave}",
)
def test_a_loop_may_carry_sums_and_counters_and_share_a_weight_with_what_is_outside(recipe):
    train_step, given = with_sums()
    expected = jax.jit(train_step)(*given)
    devices = recipe.data * recipe.tensor * recipe.pipeline
    found = mw.parallelize(train_step, cluster=f"1x{devices} cpu", method=recipe)(*given)
    for value, other in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        assert other.dtype == value.dtype
        np.testing.assert_allclose(other, value, atol=1e-12)


def nested(w, x):
    """Each layer runs twice; the batch has as many rows as that makes trips, and is carried as it is."""

    def again(carry, w):
        y = jnp.tanh(carry[0] @ w)
        return carry[0] + y, carry[1] + (y**2).mean()

    def layer(carry, w):
        return jax.lax.scan(lambda carry, _: (again(carry, w), None), carry, length=2)[0], None

    (y, balance), _ = jax.lax.scan(layer, (x, jnp.zeros(())), w)
    return (y**2).mean() + balance


def grouped(w, x):
    """A loop over groups of two layers, in each of which another loop runs."""
    y, _ = jax.lax.scan(lambda x, w: (jax.lax.scan(layer, x, w)[0], None), x, w.reshape(2, 2, 8, 8))
    return (y**2).mean()


@pytest.mark.parametrize("forward", [nested, grouped])
def test_loops_inside_of_loops_over_layers(forward):
    train_step, given = simple(forward, lambda loss: loss), (waves(0, 4, 8, 8) / 2, waves(1, 8, 8))
    expected = jax.jit(train_step)(*given)
    step = mw.parallelize(train_step, cluster="1x2 cpu", method=mw.ThreeD(pipeline=2, microbatch=2))
    for value, found in zip(expected, step(*given), strict=True):
        np.testing.assert_allclose(found, value, atol=1e-12)
    assert [stage.layers for stage in step.last_plan.stages] == (
        [(0, 2), (2, 4)] if forward is nested else [(0, 1), (1, 2)]
    )


def simple(forward, loss=lambda y: (y**2).mean()):
    def train_step(w, x):
        value, gradient = jax.value_and_grad(lambda w: loss(forward(w, x)))(w)
        return w - 0.1 * gradient, value

    return train_step


def layer(x, w):
    return x + jnp.tanh(x @ w), None


def in_a_checkpoint(w, x):
    return jax.checkpoint(lambda w, x: jax.lax.scan(layer, x, w)[0])(w, x)


def backwards(w, x):
    return jax.lax.scan(layer, x, w, reverse=True)[0]


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (in_a_checkpoint, r"at .*test_layer_loops.* is a checkpoint around a loop over layers of 2 stages.*of one lay"),
        (backwards, r"scan at .*test_layer_loops.* from the last to the first: stack them in the order"),
    ],
)
def test_loops_that_cannot_be_cut_say_why(forward, message):
    step = mw.parallelize(simple(forward), cluster="1x2 cpu", method=mw.ThreeD(pipeline=2, microbatch=4))
    with pytest.raises(mw.ShardingError, match=message):
        step(np.zeros((4, 8, 8)), np.zeros((8, 8)))


def test_axes_that_do_not_divide_the_layers_split_another_dim():
    mesh = jax.make_mesh((2, 2), ("replicas", "x"))
    assert fitted((("replicas",), ("x",)), (4, 8), mesh) == (("replicas",), ("x",))
    assert fitted((("replicas",), ("x",)), (3, 8), mesh) == ((), ("x", "replicas"))
    assert fitted((("replicas",), ("x",), ()), (3, 6, 4), mesh) == ((), ("x",), ("replicas",))
    assert fitted((("replicas",), ("x",)), (3, 2), mesh) == ((), ("x",))
