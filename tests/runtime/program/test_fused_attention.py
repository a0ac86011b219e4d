"""cuDNN's attention runs split over batch, heads and queries with equal numbers; a plain attention stands in for it.

The kernels themselves run only on GPUs. All around them is as there: the tracing, the plan, and the program.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.interpreters import mlir
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.graph.tracing.planned_devices import traced_for
from tests.draws import normal
from tests.runtime.test_spmd import run_once

pytestmark = pytest.mark.devices

FORWARD, BACKWARD = (f"dot_product_attention_{way}_wrapper" for way in ("fwd", "bwd"))


def masked_scores(q: Any, k: Any, bias: Any, q_len: Any, kv_len: Any, params: Any) -> tuple[Any, Any]:
    """Scores ``[batch, head, query token, token]`` as the kernel's parameters say, and which count."""
    k = jnp.repeat(k.astype(jnp.float32), q.shape[2] // k.shape[2], axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", q.astype(jnp.float32), k) * params["scale"]
    scores += bias.astype(jnp.float32) if bias.ndim == 4 else 0
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, scores.shape, d) for d in (2, 3))
    seen = jnp.ones(scores.shape, bool)
    if "CAUSAL" in str(params["mask_type"]):
        seen &= columns <= rows
    if params["sliding_window_length"]:
        seen &= columns > rows - params["sliding_window_length"]
    if "PADDING" in str(params["mask_type"]):
        seen &= (columns < kv_len[:, None, None, None]) & (rows < q_len[:, None, None, None])
    return jnp.where(seen, scores, -1e9), seen


def plain(q: Any, k: Any, v: Any, bias: Any, q_len: Any, kv_len: Any, params: Any) -> tuple[Any, Any]:
    """Attention of arrays ``[batch, token, head, width]`` as the kernel's parameters say, and its normaliser."""
    scores, seen = masked_scores(q, k, bias, q_len, kv_len, params)
    v = jnp.repeat(v.astype(jnp.float32), q.shape[2] // v.shape[2], axis=2)
    out = jnp.einsum("bhts,bshd->bthd", jnp.where(seen, jax.nn.softmax(scores), 0), v)
    return out.astype(q.dtype), jax.nn.logsumexp(scores, -1)


def forward(q: Any, k: Any, v: Any, bias: Any, q_len: Any, kv_len: Any, *_: Any, **params: Any) -> list[Any]:
    return list(plain(q, k, v, bias, q_len, kv_len, params))[: 1 + params["is_training"]]


def backward(q: Any, k: Any, v: Any, bias: Any, q_len: Any, kv_len: Any, *others: Any, **params: Any) -> list[Any]:
    """As the kernel, by the normaliser and the output that it is given, which may be those of more keys."""
    statistics, out, cotangent = (x.astype(jnp.float32) for x in others[-3:])
    scores, seen = masked_scores(q, k, bias, q_len, kv_len, params)
    weights = jnp.where(seen, jnp.exp(scores - statistics[..., None]), 0)
    shared = q.shape[2] // k.shape[2]
    keys, values = (jnp.repeat(x.astype(jnp.float32), shared, axis=2) for x in (k, v))
    of_weights = (
        jnp.einsum("bthd,bshd->bhts", cotangent, values) - jnp.swapaxes((cotangent * out).sum(-1), 1, 2)[..., None]
    )
    of_scores = weights * of_weights
    of_query = jnp.einsum("bhts,bshd->bthd", of_scores, keys) * params["scale"]
    of_keys = jnp.einsum("bhts,bthd->bshd", of_scores, q.astype(jnp.float32)) * params["scale"]
    of_values = jnp.einsum("bhts,bthd->bshd", weights, cotangent)
    grouped = (x.reshape(*x.shape[:2], -1, shared, x.shape[3]).sum(3) for x in (of_keys, of_values))
    of_bias = [of_scores.sum(0, keepdims=True)[:, : bias.shape[1]].astype(bias.dtype)] if bias.ndim == 4 else []
    return [x.astype(q.dtype) for x in (of_query, *grouped)] + of_bias


@pytest.fixture(scope="module", autouse=True)
def on_cpus() -> Iterator[None]:
    """The kernels as plain operations, on CPUs."""
    kernels = {cudnn._dot_product_attention_fwd_p: forward, cudnn._dot_product_attention_bwd_p: backward}
    for primitive, function in kernels.items():
        mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=True), platform="cpu")
    yield
    for primitive in kernels:
        del mlir._platform_specific_lowerings["cpu"][primitive]


def numbers(*shape: int) -> Any:
    return normal(*shape, seed=sum(shape), dtype=jnp.bfloat16)


Q, KV, BIAS = numbers(4, 16, 8, 16), numbers(4, 16, 2, 16), numbers(1, 8, 16, 16)
LENGTHS = jnp.array([16, 9, 3, 12], jnp.int32)
BATCH_AND_HEADS = {"[qkv]": P("x", None, "y")}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "window": ({"is_causal": True, "local_window_size": (4, 0)}, {}, BATCH_AND_HEADS),
    "shared heads": ({"is_causal": True}, {}, {"q": P("x", None, ("y", "z")), "[kv]": P("x", None, "y")}),
    "bias": ({}, {"bias": BIAS}, BATCH_AND_HEADS),
    "lengths": ({}, {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS}, BATCH_AND_HEADS),
    "queries": ({}, {"bias": BIAS}, {"q": P("x", "z"), "[kv]": P("x"), "rest/0": P(None, None, "z")}),
}

# How batch, tokens and heads of queries and of keys are split by the planner.
_WHOLE = [(("x", "z"), (), ("y",))] * 2
_HEADS = [(("x",), (), ("y", "z")), (("x",), (), ("y",))]
SPLITS = {
    "window": _WHOLE,
    "shared heads": _HEADS,
    "bias": _HEADS,
    "lengths": _WHOLE,
    "queries": [(("x",), ("z",), ("y",)), (("x",), (), ("y",))],
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_run_split_with_equal_numbers(name: str) -> None:
    options, given, fix = CASES[name]

    def loss(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        named = dict(zip(given, rest, strict=True))
        out = jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options, **named)
        return (out.astype(jnp.float32) ** 2).sum()

    args, which = (Q, KV, KV, *given.values()), (0, 1, 2, 3)[: 3 + ("bias" in given)]
    with traced_for(mw.cluster("1x8 h100")):
        fused = jaxpr_as_fun(jax.make_jaxpr(jax.grad(loss, argnums=which))(*args))

    def step(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return fused(q, k, v, *rest)

    mesh = mw.Mesh.abstract((2, 2, 2), alpha=0.0, beta=1e-9)  # compute is free there, and all work is split
    plan = mw.plan(step, *args, mesh=mesh, method=mw.Manual(fix))
    kernels = [op for op in plan.ops if "dot_product_attention" in op.label]
    assert [op.label.rpartition("/")[2] for op in kernels] == [FORWARD, BACKWARD]
    for op in kernels:
        assert [spec[:3] for spec in op.operands[:2] if spec] == SPLITS[name]
    results, sent = run_once(plan, step, *args)
    assert {pair.ratio for pair in sent} == {2.0}  # XLA's CPU backend sends bfloat16 as float32
    for expected, found in zip(jax.jit(fused)(*args), results, strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, expected)), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("window", "says_so"), [(None, False), (1024, False), (6000, True)])
def test_the_plan_remarks_that_a_mask_keeps_queries_together(window: int | None, says_so: bool) -> None:
    """Every device would compute again what a window reaches that is longer than half of the sequence."""
    q, kv = (jax.ShapeDtypeStruct((1, 8192, heads, 128), jnp.bfloat16) for heads in (4, 2))

    def attention(q: Any, k: Any, v: Any) -> Any:
        looks_at = None if window is None else (window, 0)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=looks_at, implementation="cudnn")

    plan = mw.plan(attention, q, kv, kv, cluster="2x8 h100")
    assert any("split over at most 4 of 16 devices" in remark for remark in plan.remarks) == says_so
    compiled = partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    written_out = mw.plan(compiled, q, kv, kv, cluster="2x8 h100")
    parts = max(op.load.num_parts for op in written_out.ops if op.load and op.load.flops)
    assert parts == 16 and not written_out.remarks
