"""Sequences split over devices: heads inside of attention, by all-to-alls, or queries with all keys; by price alone."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.graph.tracing.planned_devices import traced_for
from tests.draws import normal
from tests.runtime.program.test_fused_attention import on_cpus
from tests.runtime.test_spmd import run_once

pytestmark = pytest.mark.devices

__all__ = ["on_cpus"]  # a plain attention takes the place of cuDNN's

TOKENS, WIDTH, HEADS, HEAD_WIDTH = 64, 16, 8, 8


def attend(q: Any, k: Any, v: Any, kind: str, causal: bool) -> Any:
    if kind != "plain":
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=kind)
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bqngh,bknh->bngqk", grouped, k) * HEAD_WIDTH**-0.5
    if causal:
        scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -1e9)
    return jnp.einsum("bngqk,bknh->bqngh", jax.nn.softmax(scores), v).reshape(q.shape)


def layer(w: Any, x: Any, kind: str, causal: bool) -> Any:
    q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, w[name]) for name in "qkv")
    return x + jnp.einsum("bsnh,nhd->bsd", attend(q, k, v, kind, causal), w["o"])


def arguments(kv_heads: int, dtype: str) -> tuple[Any, Any]:
    shapes = {"q": HEADS, "k": kv_heads, "v": kv_heads}
    drawn = partial(normal, dtype=jnp.dtype(dtype))
    w = {name: drawn(WIDTH, n, HEAD_WIDTH, seed=i, scale=1 / 4) for i, (name, n) in enumerate(shapes.items())}
    w["o"] = drawn(HEADS, HEAD_WIDTH, WIDTH, seed=3, scale=1 / 8)
    return w, drawn(1, TOKENS, WIDTH, seed=4)


@pytest.mark.parametrize(
    ("kind", "causal", "kv_heads"), [("plain", True, 8), ("xla", True, 1), ("cudnn", True, 8), ("cudnn", False, 1)]
)
def test_tokens_are_split_outside_of_attention_and_heads_or_queries_inside(
    kind: str, causal: bool, kv_heads: int
) -> None:
    dtype = "bfloat16" if kind == "cudnn" else "float32"
    args = arguments(kv_heads, dtype)

    def loss(w: Any, x: Any) -> Any:
        return (layer(w, x, kind, causal).astype(jnp.float32) ** 2).sum()

    with traced_for(mw.cluster("1x8 h100")):
        traced = jax.make_jaxpr(jax.grad(loss, argnums=1))(*args)

    def step(w: Any, x: Any) -> Any:
        return jaxpr_as_fun(traced)(*jax.tree.leaves((w, x)))[0]

    mesh = mw.Mesh.abstract((8,), alpha=0.0, beta=1e-9)
    plan = mw.plan(step, *args, mesh=mesh, method=mw.Manual({"x": P(None, "x"), "out*": P(None, "x")}))
    assert all(op.load.num_parts == 8 for op in plan.ops if op.load and op.load.flops), "some devices repeat work"
    by_heads = kv_heads == 8  # otherwise there are too few heads of keys, and devices have a part of the queries
    assert ("all_to_all" in {item.kind for item in plan.collectives}) == by_heads
    for op in plan.ops:
        if "dot_product_attention" in op.label:
            assert op.operands[0] == (((), (), ("x",), ()) if by_heads else ((), ("x",), (), ()))
            assert op.operands[1] in (
                [op.operands[0]] if by_heads else [op.operands[0], ((),) * 4]
            )  # in a ring, or whole
    result, sent = run_once(plan, step, *args)
    # The CPU sends bfloat16 as float32; gradients of keys that go around are float32 anyway.
    assert all(1.0 <= pair.ratio <= 2.0 for pair in sent) if kind == "cudnn" else {pair.ratio for pair in sent} == {1.0}
    expected, found = (np.asarray(made, np.float32) for made in (jax.jit(step)(*args), result))
    rounding = 0.01 if kind == "cudnn" else 1e-6
    np.testing.assert_allclose(found, expected, rtol=rounding, atol=rounding * np.abs(expected).max())
