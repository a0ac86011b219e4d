"""Planned against compiled: the figures are XLA's, and a plan that does not say what runs is found out."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.runtime.checking.compiled import flops_of
from meshwright.runtime.checking.verify import allocated_bytes
from meshwright.runtime.spmd import spmd
from tests.compiling import QUICK
from tests.runtime.steps import CPU, batch, params, train_step

pytestmark = pytest.mark.devices


@pytest.fixture(scope="module")
def plan():
    return mw.plan(train_step, params(), batch(4096), cluster=CPU, mesh=(8,), method=mw.DataParallel())


@pytest.fixture(scope="module")
def found(plan):
    return plan.verify()


def test_what_was_planned_is_compiled(plan, found):
    gradients = sum(np.prod(p.shape) * 4 for p in jax.tree.leaves(params()))
    assert found.collectives.keys() == {("all_reduce", ("x",))}
    assert found.bytes.compiled == pytest.approx(gradients, abs=8) and found.bytes.ratio == pytest.approx(1, rel=0.01)
    # On an eighth of the batch: each product forward, once for its weights, the second once more for what it reads.
    assert found.flops.compiled == found.flops.planned == 2 * 512 * (16 * 32 * 2 + 32 * 8 * 3)
    program = spmd(plan, train_step).lower(params(), batch(4096)).compile()
    assert (found.memory.planned, found.memory.compiled) == (plan.memory.peak_bytes, allocated_bytes(program))
    for word in ("all_reduce over x", "all collectives", "memory", "flops", "8 cpu"):
        assert word in str(found)


def test_a_plan_that_says_something_else_is_found_out(plan):
    details = SimpleNamespace(collectives=(), ops=plan.ops, make_form=plan.details.make_form)
    silent = replace(plan, details=details, flops=2 * plan.flops)
    found = silent.verify()
    assert found.bytes.ratio == float("inf") and found.flops.ratio == 0.5


def test_a_loaded_plan_must_be_given_its_function(plan, found, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = mw.Plan.load(tmp_path / "plan.json")
    with pytest.raises(mw.ShardingError, match="does not know its function"):
        loaded.verify()
    assert loaded.verify(train_step, params(), batch(4096)).collectives == found.collectives


def test_products_are_counted_as_often_as_they_run():
    def function(x, w):
        return jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=5)[0]

    compiled = jax.jit(function).lower(np.ones((4, 8), "f4"), np.ones((8, 8), "f4")).compile()
    assert flops_of(compiled.as_text()) == 5 * 2 * 4 * 8 * 8


def test_factorisations_are_no_products():
    def function(x):
        return jnp.linalg.cholesky(x), jnp.linalg.qr(x), jnp.linalg.eigh(x), jnp.linalg.svd(x), x @ x

    found = mw.plan(function, jnp.eye(8), cluster=CPU, mesh=(8,), method=mw.Manual({})).verify()
    assert found.flops.compiled == found.flops.planned > 0


def test_convolutions_are_counted():
    def function(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    compiled = jax.jit(function).lower(np.ones((2, 8, 8, 3), "f4"), np.ones((3, 3, 3, 5), "f4")).compile()
    assert flops_of(compiled.as_text()) == 2 * (2 * 8 * 8 * 5) * (3 * 3 * 3)


@pytest.mark.parametrize("method", [mw.TensorParallel(), mw.Zero(stage=3)], ids=str)
def test_on_cpus_narrow_numbers_are_sent_and_kept_wide(method):
    example = zoo.build("llama-tiny", layers=1)
    found = mw.plan(example.train_step, example.state, example.batch, cluster=CPU, mesh=(2, 4), method=method).verify(
        compiler_options=QUICK
    )
    assert found.bytes.ratio == pytest.approx(1, rel=0.01)
    assert abs(found.memory.planned / found.memory.compiled - 1) <= 0.35


def branching(weights, x, flag):
    """Both branches read what is held in parts, each for itself."""

    def loss(weights):
        first, second, third, fourth = weights
        ways = (lambda h: jax.nn.relu(h @ first) @ second, lambda h: jnp.tanh(h @ third) @ fourth)
        return jnp.mean(jnp.square(jax.lax.cond(flag > 0, *ways, x)))

    return jax.tree.map(lambda w, d: w - 0.1 * d, weights, jax.grad(loss)(weights))


def looping_twice(weights, x, flag):
    """Two loops of as many trips, which read the same weights."""
    first, second, *_ = weights

    def body(h, _):
        return jnp.tanh(h @ first) @ second, None

    one, _ = jax.lax.scan(body, x, None, length=3)
    other, _ = jax.lax.scan(body, x + flag, None, length=3)
    return one, other


@pytest.mark.parametrize("function", [branching, looping_twice])
@pytest.mark.parametrize("method", [mw.Zero(stage=3), mw.TensorParallel()], ids=str)
def test_what_each_branch_or_loop_reads_is_brought_to_each(function, method):
    kinds = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 256), (256, 64)) * 2]
    x, flag = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    found = mw.plan(function, kinds, x, flag, cluster=CPU, mesh=(8,), method=method).verify(compiler_options=QUICK)
    assert found.bytes.planned > 0 and found.bytes.ratio == pytest.approx(1, abs=1e-3)
