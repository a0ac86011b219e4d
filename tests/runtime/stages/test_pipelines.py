"""Pipelines compute what one device computes, whatever their schedule, replicas, splits and recomputation."""

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.graph import trace
from meshwright.hardware.clusters import AXIS_NAMES
from meshwright.plan_files.stored_operations import parse_ops
from meshwright.runtime.stages.pipeline_program import PipelineProgram
from meshwright.schedules.instructions import EXCHANGE
from tests.generator.pipelines import outcome
from tests.runtime.stages.models import WORDS, build, compared

pytestmark = pytest.mark.devices


@pytest.fixture(autouse=True)
def wide():
    """Float64, so that rounding is no excuse."""
    with jax.enable_x64(True):
        yield


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "recipe",
    [
        mw.ThreeD(pipeline=2, microbatch=4, schedule="gpipe"),
        mw.ThreeD(pipeline=4, microbatch=4, schedule="zb-h1", checkpoint="full"),
        mw.ThreeD(pipeline=2, microbatch=4, interleave=2),
        mw.ThreeD(pipeline=3, microbatch=4, checkpoint="selective"),
    ],
    ids=lambda recipe: f"{recipe.name}-{recipe.schedule}-{recipe.interleave}-{recipe.checkpoint}",
)
def test_a_pipeline_computes_what_one_device_computes(recipe):
    worst, step = compared(*build(), recipe)
    assert worst < 1e-12
    assert len(step.recent.engine.stages) == recipe.pipeline


def test_a_loop_over_layers_is_split_at_the_cuts():
    init, train_step, batch = build(layers=8, scan=True)
    worst, step = compared(init, train_step, batch, mw.ThreeD(pipeline=4, data=2, microbatch=4))
    assert worst < 1e-12
    state = mw.create_state(init, jax.random.key(0), like=step)
    weights = state["params"]["blocks"]["w"]
    assert weights.shape == (8, 8, 8)
    assert "stages" in jax.tree.leaves(weights.sharding.spec[0])


def gated(state, x):
    """A step whose layers read their input twice, so that partial sums of its gradient are joined before they are
    added up over devices."""

    def loss(layers):
        y = x
        for up, gate, down in layers:
            y = y + (jnp.tanh(y @ up) * jax.nn.sigmoid(y @ gate)) @ down
        return (y**2).mean()

    value, gradients = jax.value_and_grad(loss)(state["w"])
    return {"w": jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], gradients)}, value


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_sums_over_devices_are_deferred_inside_of_passes(schedule):
    draw = np.random.default_rng(0)
    shapes = (16, 64), (16, 64), (64, 16)
    state = {"w": [tuple(draw.normal(size=shape) / 4 for shape in shapes) for _ in range(4)]}
    rows = draw.normal(size=(16, 16))
    recipe = mw.ThreeD(pipeline=2, tensor=2, microbatch=4, schedule=schedule, layers=4)
    run = mw.parallelize(gated, cluster="1x4 cpu", method=recipe, donate_argnums=())
    found, expected = run(state, rows), jax.jit(gated)(state, rows)
    ops = [op for view in run.last_plan.staged_record.views for op in parse_ops(view.ops, AXIS_NAMES, "ops")]
    assert any(op.waits and not op.sums for op in ops)  # or this tests nothing
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def gated_step(params, batch):
    """Blocks in which two products read one value, so that its gradient is a sum of two sums; with clipping."""

    def loss(params):
        x = batch
        for gate, up, down in params:
            x = x + (jnp.tanh(x @ gate) * (x @ up)) @ down
        return (x**2).mean()

    gradients = jax.grad(loss)(params)
    scale = 1 / optax.tree.norm(gradients)
    return jax.tree.map(lambda p, g: p - scale * g, params, gradients)


def test_sums_over_devices_are_joined_and_gradients_stay_split():
    draw = np.random.default_rng(0)
    shapes = [(16, 64), (16, 64), (64, 16)]
    params, batch = [[draw.normal(size=s) / 8 for s in shapes] for _ in range(2)], draw.normal(size=(16, 8, 16))
    recipe = mw.ThreeD(pipeline=2, tensor=2, microbatch=4)
    plan = mw.plan(gated_step, params, batch, cluster="1x4 cpu", method=recipe)
    for stage in plan.verify(devices=jax.devices()[:4]).stages:
        assert all(kind == "all_reduce" for kind, _ in stage.collectives)
        assert all(pair.ratio == pytest.approx(1) for pair in stage.collectives.values() if pair.planned > 1024)
    worst, _ = compared(lambda _: params, gated_step_with_state, batch, recipe)
    assert worst < 1e-12


def gated_step_with_state(params, batch):
    return gated_step(params, batch), jnp.mean(batch)


def test_two_stages_may_share_a_device():
    init, train_step, batch = build()
    state = jax.jit(init)(jax.random.key(0))
    plan = mw.plan(train_step, state, batch, cluster="1x2 cpu", method=mw.ThreeD(pipeline=2, microbatch=4))
    program = PipelineProgram(plan, trace(train_step, state, batch), (1,), devices=jax.devices()[:1] * 2)
    expected = jax.jit(train_step)(state, batch)
    for found, leaf in zip(jax.tree.leaves(program(state, batch)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, leaf, rtol=1e-12, atol=1e-12)


def test_a_saved_plan_with_replicas_that_are_split_computes_what_one_device_computes(tmp_path):
    init, train_step, batch = build()
    state = jax.eval_shape(init, jax.random.key(0))
    recipe = mw.ThreeD(pipeline=2, data=2, tensor=2, microbatch=4)
    mw.plan(train_step, state, batch, cluster="1x8 cpu", method=recipe).save(tmp_path / "plan.json")
    worst, step = compared(init, train_step, batch, mw.Plan.load(tmp_path / "plan.json"))
    assert worst < 1e-12
    assert len(step.recent.engine.stages) == recipe.pipeline


def test_what_a_pipeline_saves_a_plan_without_stages_restores_and_the_other_way_round(tmp_path):
    init, train_step, batch = build(layers=4, scan=True)
    pipeline = mw.parallelize(train_step, cluster="1x4 cpu", method=mw.ThreeD(pipeline=2, tensor=2, microbatch=8))
    program = mw.parallelize(train_step, cluster="1x8 cpu", method="data")
    state = mw.create_state(init, jax.random.key(0), like=pipeline, example=(batch,))
    state, _ = pipeline(state, batch)
    mw.save(tmp_path / "staged", 1, state)
    program.plan(state, batch)
    other = mw.restore(tmp_path / "staged", like=program)
    mw.save(tmp_path / "whole", 1, other)
    again = mw.restore(tmp_path / "whole", like=pipeline)
    assert jax.tree.map(lambda x: x.sharding, again) == jax.tree.map(lambda x: x.sharding, state)
    for a, b, c in zip(*map(jax.tree.leaves, (state, other, again)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    found, expected = pipeline(again, batch), program(other, batch)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_every_tensor_is_born_and_stays_in_its_stage():
    init, train_step, batch = build(tied=False)
    step = mw.parallelize(train_step, cluster="1x4 cpu", method=mw.ThreeD(pipeline=2, tensor=2, microbatch=4))
    state = mw.create_state(init, jax.random.key(0), like=step, example=(batch,))
    np.testing.assert_array_equal(state["params"]["out"], jax.random.normal(jax.random.key(0), (8, WORDS)))
    homes = [{d.id for d in block["w"].sharding.device_set} for block in state["params"]["blocks"]]
    assert homes[0] == {0, 1} and homes[-1] == {2, 3}
    assert len(state["step"].sharding.device_set) == 4
    after, _ = step(state, batch)
    before = jax.tree.map(lambda x: x.sharding, state)
    assert jax.tree.map(lambda x: x.sharding, after) == before


def normalised(state, x):
    """A step with batch norm."""

    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
            y = (y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-5)
        return (y**3).mean()

    value, gradients = jax.value_and_grad(loss)(state["w"])
    return {"w": [w - 0.1 * g for w, g in zip(state["w"], gradients, strict=True)]}, value


def test_what_cannot_be_cut_says_why():
    state = {"w": [np.eye(8), np.ones((8, 8)) + np.eye(8)]}
    rows = np.random.default_rng(0).normal(size=(16, 8))
    run = mw.parallelize(normalised, cluster="1x2 cpu", method=mw.ThreeD(pipeline=2, microbatch=4, layers=2))
    with pytest.raises(mw.ShardingError, match=r"at .* needs a value that is known only after the whole batch"):
        run(state, rows)
    whole = mw.ThreeD(pipeline=2, microbatch=16, layers=2)
    found, expected = (
        mw.parallelize(normalised, cluster="1x2 cpu", method=whole)(state, rows),
        jax.jit(normalised)(state, rows),
    )
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def only_finite(optimizer):
    return optax.apply_if_finite(optimizer, max_consecutive_errors=5)


def several_steps(optimizer):
    return optax.MultiSteps(optimizer, 2, should_skip_update_fn=optax.skip_not_finite).gradient_transformation()


def counted(change):
    """An optimizer that changes the gradients given the number of the step."""

    def update(updates, count, params=None):
        return change(updates, count), count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def spoiled(updates, count):
    """Gradients that are not finite in the second step."""
    return jax.tree.map(lambda x: jnp.where(count == 1, jnp.nan, x), updates)


def squared(updates, count):
    """Gradients that a product changes, now and then."""
    return jax.lax.cond(count % 2 == 1, lambda u: jax.tree.map(lambda x: x @ x.T @ x, u), lambda u: u, updates)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("guard", "scan"), [(only_finite, False), (several_steps, True)])
def test_each_stage_makes_a_conditional_update_for_itself(guard, scan):
    """Whether all gradients are finite is known once all stages have said so; a skipped step changes nothing."""
    inner = guard(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)))
    model = build(optimizer=optax.chain(counted(spoiled), inner), tied=False, scan=scan)
    worst, step = compared(*model, mw.ThreeD(pipeline=2, microbatch=8))
    assert worst < 1e-12
    exchanged = [one.run.type for one in step.recent.engine.bound if one.work == EXCHANGE]
    assert exchanged and all(len(kind.shape) == 1 and kind.shape[0] < 16 for kind in exchanged)  # packed numbers alone


def test_a_branch_with_products_is_not_run_in_vain():
    def matrices(params):
        return jax.tree.map(lambda x: x.ndim == 2, params)

    optimizer = optax.chain(optax.masked(counted(squared), matrices), optax.sgd(1e-3))
    worst, step = compared(*build(optimizer=optimizer, tied=False), mw.ThreeD(pipeline=2, microbatch=8))
    assert worst < 1e-12
    updates = step.recent.engine.programs.updates.values()
    assert [piece.unit.name for program in updates for piece in program.pieces].count("cond") == 1


@pytest.mark.sweep(1)
@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_dropout_draws_the_bits_of_the_whole_batch_in_both_passes(checkpoint):
    recipe = mw.ThreeD(pipeline=2, microbatch=8, checkpoint=checkpoint)
    worst, _ = compared(*build(dropout=0.5), recipe)
    assert worst < 1e-12


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", [3])
def test_a_random_train_step_in_a_random_pipeline(seed):
    """Many more: `python benchmarks/equality.py --pipelines 200`."""
    found = outcome(seed, 0)
    assert not found.trouble
    assert "refused" not in found.pair  # or this tests nothing


def test_passes_read_what_is_prepared_from_keys_and_from_the_whole_batch():
    """A part of a key that was split, and weights of examples over their sum, are known before the first pass."""

    def init(key):
        return {"w": list(jax.random.normal(key, (2, 8, 8)) / 3), "key": jax.random.key(3)}

    def train_step(state, batch):
        key, own = jax.random.split(state["key"])

        def loss(w):
            x = jnp.tanh(batch["x"] @ w[0])
            x = jnp.where(jax.random.bernoulli(own, 0.9, x.shape), x, 0) @ w[1]
            weights = batch["kept"] / jnp.maximum(2 * batch["kept"].sum(), 1)
            return jnp.sum(weights[:, None] * x**2)

        value, gradients = jax.value_and_grad(loss)(state["w"])
        return {"w": [w - 0.1 * g for w, g in zip(state["w"], gradients, strict=True)], "key": key}, value

    draw = np.random.default_rng(0)
    batch = {"x": draw.normal(size=(12, 8)), "kept": draw.integers(0, 2, 12)}
    step = mw.parallelize(train_step, cluster="1x2 cpu", method=mw.ThreeD(pipeline=2, microbatch=4, layers=2))
    state = mw.create_state(init, jax.random.key(0), like=step, example=(batch,))
    expected, value = jax.jit(train_step)(jax.jit(init)(jax.random.key(0)), batch)
    found, same = step(state, batch)
    np.testing.assert_allclose(same, value, atol=1e-12)
    np.testing.assert_allclose(found["w"], expected["w"], atol=1e-12)
    assert found["key"] == expected["key"]


def reconstruct(params, batch):
    """A step that returns values of its examples; one has the batch's own type, one has the examples last."""

    def loss(params):
        made = batch
        for w in params:
            made = made + jnp.tanh(made @ w)
        errors = (made - batch) ** 2
        return errors.mean(), (made, errors.mean(1), made[:, :3].T)

    (value, found), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), (value, *found)


@pytest.mark.parametrize(("data", "microbatch"), [(1, 1), (2, 2)])
def test_results_of_the_examples_are_joined(data, microbatch):
    draw = np.random.default_rng(0)
    params, batch = [draw.normal(size=(4, 4)) / 2 for _ in range(4)], draw.normal(size=(8, 4))
    recipe = mw.ThreeD(pipeline=2, data=data, microbatch=microbatch)
    worst, step = compared(lambda _: params, reconstruct, batch, recipe)
    assert worst < 1e-12
    assert step.last_plan.pipeline.num_microbatches == 8 // (data * microbatch)


def printing_step(seen):
    """A step that calls back with a loss, a gradient, a mean of each layer, an argument and nothing at all."""

    def step(state, batch):
        def loss(layers):
            x = batch
            for w in layers:
                x = x + jnp.tanh(x @ w)
                jax.debug.callback(lambda mean: seen.append(round(float(mean), 6)), x.mean())
            return (x**2).mean()

        value, gradients = jax.value_and_grad(loss)(state["w"])
        jax.debug.callback(lambda loss: seen.append(("loss", round(float(loss), 6))), value)
        jax.debug.callback(lambda number, g: seen.append((int(number), g.shape)), state["step"], gradients[0])
        jax.debug.callback(lambda: seen.append("called"))
        return {
            "w": [w - 0.1 * g for w, g in zip(state["w"], gradients, strict=True)],
            "step": state["step"] + 1,
        }, value

    return step


@pytest.mark.parametrize("microbatch", [2, 8])
def test_what_is_printed_is_printed_once_a_step(microbatch):
    draw = np.random.default_rng(0)
    state, batch = {"w": [draw.normal(size=(4, 4)) / 2 for _ in range(4)], "step": 0}, draw.normal(size=(8, 4))
    alone, found = [], []
    one = jax.jit(printing_step(alone))
    recipe = mw.ThreeD(pipeline=2, microbatch=microbatch)
    many = mw.parallelize(printing_step(found), cluster="1x2 cpu", method=recipe)
    both = state, state
    for _ in range(2):
        both = one(both[0], batch)[0], many(both[1], batch)[0]
    jax.effects_barrier()
    assert len(found) == 14 and sorted(map(str, found)) == sorted(map(str, alone))


def test_calls_back_for_values_are_refused():
    def step(params, batch):
        def loss(params):
            return ((batch @ params[0] @ params[1]) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        value = jax.experimental.io_callback(lambda x: x, jax.ShapeDtypeStruct((), value.dtype), value)
        return [p - g for p, g in zip(params, gradients, strict=True)], value

    many = mw.parallelize(step, cluster="1x2 cpu", method=mw.ThreeD(pipeline=2, microbatch=4))
    with pytest.raises(mw.ShardingError, match=r"io_callback at .* has side effects.*without stages"):
        many([np.eye(4)] * 2, np.ones((8, 4)))
