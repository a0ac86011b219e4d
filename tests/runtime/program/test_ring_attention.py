"""Fused attention split over its tokens, by blocks: numbers of one device, and nothing is sent but what was planned.

Devices compute slowly here and send without delay, so that keys which go around in a ring cost nothing. A plain
attention that runs on CPUs stands in for cuDNN's.
"""

from dataclasses import replace
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
from meshwright.parallelism.sentence import plain_sentence
from tests.draws import normal
from tests.runtime.program.test_fused_attention import BACKWARD, FORWARD, on_cpus
from tests.runtime.test_spmd import run_once

pytestmark = pytest.mark.devices

__all__ = ["on_cpus"]  # a plain attention takes the place of cuDNN's

TOKENS = 32
RING, GATHERED = P(None, "x"), P()
LENGTHS = {name: jnp.array([n], jnp.int32) for name, n in (("query_seq_lengths", 25), ("key_value_seq_lengths", 21))}


def slow_cpus(num_devices: int = 8) -> mw.Cluster:
    cpus = mw.cluster(f"1x{num_devices} cpu")
    at_once = tuple(replace(protocol, base_s=0.0, hop_s=0.0) for protocol in cpus.host.intra.protocols)
    chip = replace(cpus.chip, flops=tuple((dtype, 1e8) for dtype, _ in cpus.chip.flops), launch_s=0.0)
    return replace(cpus, host=replace(cpus.host, intra=replace(cpus.host.intra, protocols=at_once)), chip=chip)


def attention_step(heads: int, kv_heads: int, options: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Fused attention and its gradients, as traced for a chip that has the kernel; with its arguments."""
    lengths = LENGTHS if options.get("lengths") else {}
    options = {name: value for name, value in options.items() if name != "lengths"}
    shapes = ((1, TOKENS, n, 8) for n in (heads, kv_heads, kv_heads))
    args = [normal(*shape, seed=i, dtype=jnp.bfloat16) for i, shape in enumerate(shapes)]

    def loss(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        named = dict(zip(lengths, rest, strict=True))
        out = jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options, **named)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out.astype(jnp.float32) * weights).sum()

    args += lengths.values()
    with traced_for(mw.cluster("1x8 h100")):
        traced = jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*args)

    def step(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return jaxpr_as_fun(traced)(q, k, v, *rest)

    return step, tuple(args)


CAUSAL, WINDOW = {"is_causal": True}, {"is_causal": True, "local_window_size": (5, 0)}
CASES: dict[str, tuple[tuple[int, int], dict[str, Any], Any, str]] = {
    "causal, ring": ((2, 1), CAUSAL, RING, "ring"),
    "causal, gathered": ((2, 1), CAUSAL, GATHERED, "exchange"),
    "all keys, ring": ((1, 1), {}, RING, "ring"),
    "lengths, ring": ((1, 1), {"lengths": True}, RING, "ring"),
    "causal and lengths, ring": ((1, 1), CAUSAL | {"lengths": True}, RING, "ring"),
    "causal and lengths, gathered": ((1, 1), CAUSAL | {"lengths": True}, GATHERED, "exchange"),
    "window": ((1, 1), WINDOW, GATHERED, "reshard"),
    "lengths, gathered": ((1, 1), {"lengths": True}, GATHERED, "reshard"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_forward_and_backward_have_the_numbers_of_one_device(name: str) -> None:
    heads, options, keys, sent_for = CASES[name]
    step, args = attention_step(*heads, options)
    fix = {"q": P(None, "x"), "[kv]": keys, "out/1": P(None, "x"), "out/[23]": keys}
    plan = mw.plan(step, *args, mesh=slow_cpus().mesh((8,)), method=mw.Manual(fix))
    split = {op.label.rpartition("/")[2]: op for op in plan.ops if "dot_product_attention" in op.label}
    for primitive in (FORWARD, BACKWARD):
        queries, held = split[primitive].operands[:2]
        assert queries == ((), ("x",), (), ())
        assert held == (queries if sent_for == "ring" else ((),) * 4)
    assert {"ring", "exchange"} & {c.purpose for c in plan.collectives} == (
        {"ring", "exchange"} & {sent_for} | ({"exchange"} if "causal" in name else set())
    )
    results, sent = run_once(plan, step, *args)
    if sent_for == "ring":
        assert {pair.ratio for pair in sent} == {1.0}
    for expected, found in zip(jax.jit(step)(*args), results, strict=True):
        expected, found = (np.asarray(x, np.float32) for x in (expected, found))
        np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.01 * np.abs(expected).max())


def layers_step(scanned: bool) -> tuple[Any, tuple[Any, ...]]:
    """A training step of two layers of causal attention with a product before and after, as traced for a GPU."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, w[name]) for name in "qkv")
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return x + jnp.einsum("bsnh,nhd->bsd", mixed, w["o"]), None

    def loss(ws: Any, x: Any) -> Any:
        if scanned:
            x, _ = jax.lax.scan(jax.checkpoint(layer), x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ws))
        else:
            for w in ws:
                x, _ = layer(x, w)
        return (x.astype(jnp.float32) ** 2).mean()

    def train(ws: Any, x: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value

    drawn = partial(normal, dtype=jnp.bfloat16, scale=1 / 4)
    sizes = {"q": (8, 2, 8), "k": (8, 1, 8), "v": (8, 1, 8), "o": (2, 8, 8)}
    ws = [{name: drawn(*shape, seed=i + 9 * n) for i, (name, shape) in enumerate(sizes.items())} for n in range(2)]
    args = ws, drawn(2, TOKENS, 8, seed=99)
    with traced_for(mw.cluster("1x8 h100")):
        traced = jax.make_jaxpr(train)(*args)

    def step(ws: Any, x: Any) -> tuple[Any, Any]:
        *new, value = jaxpr_as_fun(traced)(*jax.tree.leaves((ws, x)))
        return jax.tree.unflatten(jax.tree.structure(ws), new), value

    return step, args


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("scanned", "microbatches"), [(False, 2), (True, 1)])
@pytest.mark.slow
def test_layers_train_with_the_numbers_of_one_device(scanned: bool, microbatches: int) -> None:
    step, args = layers_step(scanned)
    run = mw.parallelize(
        step,
        cluster=slow_cpus(),
        mesh=(8,),
        method=mw.Manual({"x": P(None, "x")}, microbatches=microbatches),
        batch_argnums=1,
        donate_argnums=(),
    )
    found = run(*args)
    plan = run.last_plan
    assert "attention over the sequence, keys in a ring ×8 over x" in str(plan.verdict)
    assert "attention over the sequence, keys in a ring" in plain_sentence(plan).lower()
    assert plan.microbatches == microbatches and not plan.remarks
    for expected, made in zip(jax.tree.leaves(jax.jit(step)(*args)), jax.tree.leaves(found), strict=True):
        expected, made = (np.asarray(x, np.float32) for x in (expected, made))
        np.testing.assert_allclose(made, expected, rtol=0.03, atol=0.01 * np.abs(expected).max())
