"""Fused kernels run on each device's own parts: with equal numbers, and nothing is sent but what was planned."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import ShardingError
from meshwright.runtime.spmd import spmd
from tests.draws import normal
from tests.pallas_ops import attention, decode_attention, rms_norm, softmax
from tests.runtime.test_spmd import run_once

pytestmark = pytest.mark.devices

MESH = mw.Mesh.abstract((2, 4), alpha=0.0, beta=1e-9)


def numbers(*shape: int) -> Any:
    return normal(*shape, seed=sum(shape))


def scaled(x: Any, w: Any) -> Any:
    """Rows in blocks of two, each block multiplied by a weight that all share."""

    def kernel(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * w_ref[...]

    spec = pl.BlockSpec((2, x.shape[1]), lambda i: (i, 0))
    whole = pl.BlockSpec(w.shape, lambda i: (0,))
    grid = (x.shape[0] // 2,)
    return pl.pallas_call(kernel, out_shape=x, grid=grid, in_specs=[spec, whole], out_specs=spec, interpret=True)(x, w)


def mha(q: Any, k: Any, v: Any) -> Any:
    blocks = attention.BlockSizes(
        block_q=16, block_k=16, block_q_dkv=16, block_kv_dkv=16, block_q_dq=16, block_kv_dq=16
    )
    return attention.mha(q, k, v, None, causal=True, block_sizes=blocks, interpret=True)


def mha_gradients(q: Any, k: Any, v: Any) -> Any:
    return jax.grad(lambda *args: (mha(*args) ** 2).sum(), argnums=(0, 1, 2))(q, k, v)


def norm_gradient(x: Any, w: Any, b: Any) -> Any:
    return jax.grad(lambda x: (rms_norm.rms_norm(x, w, b, interpret=True) ** 2).sum())(x)


BATCH, HEADS = P("x"), P(None, None, "y")
BOTH = P("x", None, "y")
CASES = {
    "scaled": (scaled, (numbers(16, 8), numbers(8)), {"x": P(("x", "y"))}),
    "attention over batch and heads": (mha, [numbers(2, 32, 4, 16)] * 3, {"[qkv]": BOTH}),
    "gradients of attention": (mha_gradients, [numbers(2, 32, 4, 16)] * 3, {"[qkv]": BOTH}),
    "gradient of a norm": (norm_gradient, (numbers(8, 4, 32), numbers(32), numbers(32)), {"x": P("x", "y")}),
    "softmax": (lambda x: softmax.softmax(x, interpret=True), (numbers(8, 4, 32),), {"x": P("x", "y")}),
    "decoding": (
        lambda q, k, v: decode_attention.gqa(q, k, v, k_splits=2, block_h=4, interpret=True),
        (numbers(4, 16, 16), numbers(4, 32, 4, 16), numbers(4, 32, 4, 16)),
        {"q": P("x", "y"), "[kv]": BOTH},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_pallas_kernels_run_split_with_equal_numbers(name: str) -> None:
    function, args, fix = CASES[name]
    plan = mw.plan(function, *args, mesh=MESH, method=mw.Manual(fix))
    kernels = [op for op in plan.ops if op.label.endswith("pallas_call")]
    assert any(axes for op in kernels for spec in op.operands if spec for axes in spec), "no kernel is split"
    results, sent = run_once(plan, function, *args)
    assert all(pair.ratio == 1 for pair in sent)
    for expected, found in zip(jax.tree.leaves(jax.jit(function)(*args)), jax.tree.leaves(results), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-5)


def test_a_kernel_in_a_loop_under_a_checkpoint_is_split() -> None:
    def loss(q: Any) -> Any:
        body = jax.checkpoint(lambda x, _: (mha(x, x, x), None))
        return (jax.lax.scan(body, q, None, length=2)[0] ** 2).sum()

    q = numbers(2, 32, 4, 16)
    plan = mw.plan(jax.grad(loss), q, mesh=MESH, method=mw.Manual({"q": BOTH}))
    found, sent = run_once(plan, jax.grad(loss), q)
    assert not sent
    np.testing.assert_allclose(np.asarray(found), np.asarray(jax.jit(jax.grad(loss))(q)), rtol=1e-4, atol=1e-5)


def test_microbatches_cut_a_kernel_along_its_grid() -> None:
    def step(w: Any, x: Any) -> Any:
        goal = softmax.softmax(x, interpret=True)
        loss, grad = jax.value_and_grad(lambda w: ((x @ w - goal) ** 2).mean())(w)
        return w - grad, loss

    args = numbers(8, 8), numbers(16, 8)
    run = mw.parallelize(step, mesh=MESH, microbatches=2, donate_argnums=())
    for expected, found in zip(jax.tree.leaves(jax.jit(step)(*args)), jax.tree.leaves(run(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-6)
    assert not [remark for remark in run.last_plan.remarks if "microbatches" in remark]


def test_a_rule_that_splits_more_than_the_grid_is_refused() -> None:
    def doubled(x: Any) -> Any:
        def kernel(x_ref: Any, out_ref: Any) -> None:
            out_ref[...] = 2 * x_ref[...]

        return pl.pallas_call(kernel, out_shape=x, interpret=True, name="too_free")(x)

    @mw.rule("too_free")
    def rule(op: Any) -> Any:
        return mw.nest("a b -> a b", op, leads=True)

    x = numbers(8, 8)
    plan = mw.plan(doubled, x, mesh=MESH, method=mw.Manual({"x": P("x")}))
    with pytest.raises(ShardingError, match="'too_free' cannot run split along dim 0 of operand 0"):
        spmd(plan, doubled)(x)


def test_kernels_of_other_devices_are_refused_in_one_sentence() -> None:
    q = jax.ShapeDtypeStruct((8, 64, 8, 64), "bfloat16")

    def fused(q: Any) -> Any:
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    def pallas(q: Any) -> Any:
        return attention.mha(q, q, q, None)

    for function, message in (
        (fused, "runs cuDNN's fused attention, and .*platform 'cpu'.*implementation=\"xla\""),
        (pallas, "runs the Pallas kernel 'mha_forward'.*platform 'cpu'.*interpret=True"),
    ):
        plan = mw.plan(function, q, cluster="1x8 h100")
        with pytest.raises(ShardingError, match=message):
            spmd(plan, function).lower(q)
        with pytest.raises(ShardingError, match=message):
            plan.rehearse(steps=0)


def test_a_kernel_runs_split_on_a_mesh_that_the_user_named() -> None:
    """Its body was traced with that mesh in context, of which a device on its own knows nothing."""

    def function(x: Any) -> Any:
        def kernel(x_ref: Any, out_ref: Any) -> None:
            out_ref[...] = jax.lax.fori_loop(0, 2, lambda i, sum: sum + 2 * x_ref[...], x_ref[...])

        spec = pl.BlockSpec((2, x.shape[1]), lambda i: (i, 0))
        return pl.pallas_call(kernel, out_shape=x, grid=(8,), in_specs=[spec], out_specs=spec, interpret=True)(
            jax.lax.with_sharding_constraint(x, P("data", None))
        )

    x = numbers(16, 8)
    step = mw.parallelize(function, cluster="1x8 cpu", mesh={"data": 4, "model": 2})
    np.testing.assert_allclose(step(x), 5 * x, rtol=1e-6)
    assert step.plan(x).out_shardings[0] == ("data", "model")
