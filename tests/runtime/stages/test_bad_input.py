"""A pipeline that cannot run says so in one message, before anything is compiled or sent."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from tests.runtime.stages.models import build

pytestmark = pytest.mark.devices

RECIPE = mw.ThreeD(pipeline=2, microbatch=4)


def types_of(init):
    return jax.eval_shape(init, jax.random.key(0))


@pytest.fixture(scope="module")
def model():
    init, step, batch = build()
    return init, step, batch, mw.plan(step, types_of(init), batch, cluster="1x2 cpu", method=RECIPE)


@pytest.mark.parametrize(
    ("cluster", "recipe", "error", "said"),
    [
        (
            "2x8 cpu",
            mw.ThreeD(pipeline=2, data=8, microbatch=2),
            mw.ClusterError,
            r'2 stages on 16 devices, and there are 8; run it where there are enough, or plan for cluster="local"',
        ),
        (
            "1x2 cpu",
            mw.ThreeD(pipeline=2, microbatch=5),
            mw.ShardingError,
            r"a batch of 16 rows does not divide into microbatches of 5 .*use a batch that is a multiple of 5",
        ),
    ],
    ids=["devices", "microbatch"],
)
def test_recipes_that_devices_or_batch_do_not_allow(model, cluster, recipe, error, said):
    init, step, batch, _ = model
    with pytest.raises(error, match=said):
        mw.parallelize(step, cluster=cluster, method=recipe)(init(jax.random.key(0)), batch)


def test_plans_whose_microbatches_do_not_divide_the_batch(model):
    init, step, batch, plan = model
    odd = replace(plan, pipeline=replace(plan.pipeline, num_microbatches=3))
    with pytest.raises(mw.ShardingError, match=r"into 3 microbatches for 1 replicas, and batch/x has 16 rows.*of 3"):
        mw.parallelize(step, method=odd)(init(jax.random.key(0)), batch)


def test_plans_of_another_batch_depth_or_width(model):
    init, step, batch, plan = model
    rows = {name: x[:12] for name, x in batch.items()}
    with pytest.raises(mw.ShardingError, match=r"the plan has batch/x as int32\[16\] and it is int32\[12\] here"):
        mw.parallelize(step, method=plan)(init(jax.random.key(0)), rows)
    for options, said in (
        ({"layers": 5}, r"the plan is for 31 arrays as arguments, and the function has 37; make the plan again"),
        ({"width": 16}, r"the plan has state/opt/.* as float32\[8\] and it is float32\[16\] here"),
        ({"dropout": 0.5}, r"a program of \d+ operations .*, and this one has \d+ and 31: make the plan again"),
    ):
        other, other_step, _ = build(**options)
        with pytest.raises(mw.ShardingError, match=said):
            mw.parallelize(other_step, method=plan)(other(jax.random.key(0)), batch)
        with pytest.raises(mw.ShardingError, match=r"make the plan again"):
            plan.verify(other_step, types_of(other), batch)


def test_plans_of_a_program_of_as_many_other_operations():
    def step(function):
        def run(w, x):
            loss, gradients = jax.value_and_grad(lambda w: (function(x @ w[0]) @ w[1]).sum())(w)
            return [p - g for p, g in zip(w, gradients, strict=True)], loss

        return run

    arguments = [jnp.ones((8, 8))] * 2, jnp.ones((16, 8))
    recipe = replace(RECIPE, layers=2)
    plan = mw.plan(step(jax.lax.sinh), *arguments, cluster="1x2 cpu", method=recipe)
    mw.parallelize(step(jax.lax.sinh), method=plan)(*arguments)
    with pytest.raises(mw.ShardingError, match=r"operation \d+ is sinh, and this one's is cosh; make the plan again"):
        mw.parallelize(step(jax.lax.cosh), method=plan)(*arguments)


def test_an_instruction_list_of_a_stage_that_is_not_there(model):
    *_, plan = model
    with pytest.raises(mw.ShardingError, match=r"stage is 2; the plan has stages 0 to 1"):
        plan.instructions(2)
