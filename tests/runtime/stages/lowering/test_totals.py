"""Sums over devices are deferred to the end of a step, as planned, or scattered where the plan spreads gradients."""

from dataclasses import replace
from math import prod
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.parallelism.subject.subject import Subjects
from tests.runtime.stages.models import build, compared

pytestmark = pytest.mark.devices

ROWS, TABLE = 8, 256 * 64  # numbers of the table of words, whose gradient is a sum over the devices of a replica


@pytest.fixture(scope="module")
def model():
    """GPT in float64, so that rounding is no excuse."""
    with jax.enable_x64(True):
        example = zoo.build("gpt-tiny", batch=ROWS, seq=64, layers=2, dtype="float64")
        plain = example.train_step.__wrapped__

        def step(state, batch):
            with mock.patch.object(jnp, "float32", jnp.float64):  # softmax, norms and loss are computed in float32
                return plain(state, batch)

        state = jax.tree.map(wide, example.init(0))
        yield lambda _: state, step, example.sample(0)


def wide(x):
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def planned_sums(plan, number):
    """Sums of gradients over the devices of a replica, which the plan counts once a step."""
    found = [c for c in Subjects(plan)[number].collectives if c.purpose == "gradient" and c.axes == ("y",)]
    assert all(c.trips == 1 for c in found)
    return {c.kind: c.bytes for c in found}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "recipe",
    [
        mw.ThreeD(pipeline=2, tensor=2, data=2, microbatch=2),
        mw.ThreeD(pipeline=2, tensor=2, microbatch=2, schedule="zb-h1"),
    ],
    ids=lambda recipe: f"{recipe.name}-{recipe.schedule}",
)
def test_gradients_are_added_up_over_devices_once_a_step(model, recipe):
    """What is sent without replicas and by 1F1B, the next test compiles."""
    worst, step = compared(*model, recipe)
    plan, found = step.last_plan, step.recent.engine.stages[0].pieces.waits
    assert worst < 1e-11
    assert planned_sums(plan, 0)["reduce_scatter"] == 8 * TABLE  # or this tests nothing
    assert planned_sums(plan, 0)["all_reduce"]
    assert len(found) == 3 and all(found.values())
    if recipe.data == 1:
        first = plan.verify().stages[0].collectives
        assert first["all_reduce", ("y",)].ratio == pytest.approx(1, abs=0.001)


def test_where_memory_is_short_parts_of_sums_are_held(model):
    init, step, batch = model
    recipe = mw.ThreeD(pipeline=2, tensor=2, microbatch=2)
    plan = mw.plan(step, init(0), batch, cluster="1x4 cpu", method=recipe)
    tight = replace(plan, memory=replace(plan.memory, limit_bytes=plan.memory.peak_bytes))
    ample, short = (one.verify(step, init(0), batch).stages[0] for one in (plan, tight))
    assert ample.collectives["all_reduce", ("y",)].ratio == pytest.approx(1, abs=0.001)
    times = plan.pipeline.num_microbatches - 1
    more = short.collectives["all_reduce", ("y",)].compiled - ample.collectives["all_reduce", ("y",)].compiled
    assert more == times * 8 * TABLE  # the table's gradient is scattered with each microbatch
    assert ample.memory.compiled > short.memory.compiled


def test_spread_gradients_are_scattered_with_each_microbatch_and_spread_parameters_gathered():
    recipe = mw.ThreeD(pipeline=2, data=4, microbatch=4)
    with jax.enable_x64(True):
        init, step, batch = build(width=64, rows=32, tied=False)
        with pytest.raises(mw.DoesNotFit) as nothing:
            tiny = replace(recipe, memory_fraction=1e-6)
            mw.plan(step, jax.eval_shape(init, jax.random.key(0)), batch, cluster="1x8 cpu", method=tiny)
        share = 1e-6 * 1.05 * nothing.value.needed_bytes / nothing.value.limit_bytes
        worst, run = compared(init, step, batch, replace(recipe, memory_fraction=share))
        plan, engine = run.last_plan, run.recent.engine
        verified = plan.verify()
    assert [stage.method for stage in plan.stages] == ["x: batch, x: all state", "x: batch, x: optimizer and gradients"]
    assert worst < 1e-12
    for lowering, found in zip(engine.stages, verified.stages, strict=True):
        large = [total for total in lowering.totals.values() if len(total.shape) == 2]
        assert large and all(total.part is not None for total in large)
        assert all(4 * prod(total.sharding.shard_shape(total.type.shape)) == prod(total.shape) for total in large)
        assert found.collectives["all_reduce", ("x",)].ratio == pytest.approx(1, abs=0.01)
        # The backward pass reads neither the table nor the biases, and does not gather them.
        assert 0.95 < found.collectives["all_gather", ("x",)].ratio <= 1
