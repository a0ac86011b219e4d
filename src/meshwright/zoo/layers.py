"""What the models share: norms, attention, the loss, and running a stack of layers.

Weights are float32 and are cast at use to the dtype of the activations they meet, so a model computes in whatever
dtype its first activation has. Softmax, norms and the loss are computed in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.zoo.draw import integers, split

Array = Any
PyTree = Any


def project(spec: str, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Multiplies by a weight as the einsum `spec` says, in the activations' dtype, and adds a bias if there is one."""
    y = jnp.einsum(spec, x, weight.astype(x.dtype))
    return y if bias is None else y + bias.astype(x.dtype)


def rms_norm(x: Array, scale: Array, epsilon: float = 1e-5) -> Array:
    """Root-mean-square norm over the last dim (https://arxiv.org/abs/1910.07467)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    return (y * scale).astype(x.dtype)


def init_layer_norm(dim: int) -> PyTree:
    """Returns the weights of a layer norm."""
    return {"scale": jnp.ones(dim), "bias": jnp.zeros(dim)}


def layer_norm(x: Array, weights: PyTree, epsilon: float = 1e-5) -> Array:
    """Layer norm over the last dim, with scale and bias (https://arxiv.org/abs/1607.06450)."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    return (y * weights["scale"] + weights["bias"]).astype(x.dtype)


@jax.named_scope("attend")
def attend(q: Array, k: Array, v: Array, *, causal: bool) -> Array:
    """Softmax attention with grouped queries.

    Args:
        q: Queries, (batch, seq, kv_heads, group, head_dim): each group of query heads shares one head of k and v.
        k: Keys, (batch, seq, kv_heads, head_dim).
        v: Values, (batch, seq, kv_heads, head_dim).
        causal: Whether a position may look only at itself and at earlier ones.
    """
    scores = jnp.einsum("bqngh,bknh->bngqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    if causal:
        positions = jnp.arange(q.shape[1])
        scores = jnp.where(positions[:, None] >= positions[None, :], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bngqk,bknh->bqngh", weights, v)


@jax.named_scope("cross_entropy")
def cross_entropy(logits: Array, labels: Array) -> Array:
    """Negative log likelihood of each label, in float32; has the shape of `labels`."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def init_stack(init_layer: Callable[[Array], PyTree], key: Array, count: int, *, scan: bool) -> PyTree:
    """Returns the weights of `count` layers: a list of them or, to be scanned, one tree stacked on a leading dim."""
    keys = split(key, count)
    if scan and not isinstance(keys, list):
        return jax.vmap(init_layer)(keys)
    layers = [init_layer(k) for k in keys]
    return jax.tree.map(lambda *weights: jnp.stack(weights), *layers) if scan else layers


def run_stack(layer: Callable[[PyTree, PyTree], PyTree], stack: PyTree, x: PyTree, *, checkpoint: bool) -> PyTree:
    """Runs `x = layer(weights, x)` through a list of layers' weights, or scans over stacked ones."""
    unrolled = isinstance(stack, list)
    if checkpoint:
        layer = jax.checkpoint(layer, prevent_cse=unrolled)  # a scan's body cannot be merged with its backward pass
    if unrolled:
        for weights in stack:
            x = layer(weights, x)
        return x
    x, _ = jax.lax.scan(lambda x, weights: (layer(weights, x), None), x, stack)
    return x


def sample_tokens(key: Array, batch: int, seq: int, vocab: int) -> PyTree:
    """Returns random tokens, each labelled with its successor."""
    tokens = integers(key, batch, seq + 1, below=vocab)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
