"""Attention as people train with it: one fused kernel, or the scores written out.

`"fused"` never stores the scores: cuDNN's kernel on NVIDIA GPUs. `"plain"` is ordinary JAX that runs anywhere. A model
that names neither takes the fused kernel where the program is traced for a GPU that has one.
"""

import jax
import jax.numpy as jnp

from meshwright.zoo.layers import Array

# The largest heads of cuDNN's kernels, from a compute capability on: there are none before Ampere. The compute
# capability of an AMD chip is no number.
_LARGEST_HEAD = ((8, 128), (9, 256))


@jax.named_scope("attend")
def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool,
    kind: str | None = None,
    window: int | None = None,
    scale: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Softmax attention; each group of query heads shares one head of keys and values.

    Args:
        q: Queries, (batch, seq, heads, head_dim).
        k: Keys, (batch, seq, kv_heads, head_dim).
        v: Values, (batch, seq, kv_heads, value_dim).
        causal: Whether a position may look only at itself and at earlier ones.
        kind: `"fused"`, `"plain"`, or None for the fused kernel where there is one.
        window: With `causal`, how many positions, its own included, each one looks at; None for all.
        scale: The factor of the scores; `head_dim ** -0.5` by default.
        sinks: A score for each head that takes part in the softmax and stands for no position.

    Returns:
        The mixed values, (batch, seq, heads, value_dim).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if kind == "fused" or (kind is None and sinks is None and _has_kernel(q)):
        assert sinks is None, "no fused kernel knows sinks"
        return _fused(q, k, v, causal, window, scale)
    return _plain(q, k, v, causal, window, scale, sinks)


def _has_kernel(q: Array) -> bool:
    """Whether the chip for which the program is traced has a fused kernel for these queries."""
    if jax.default_backend() != "gpu" or q.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    if q.shape[-1] % 8 or q.shape[1] % 2:  # some versions train on even lengths only
        return False
    major = getattr(jax.devices()[0], "compute_capability", "").partition(".")[0]
    largest = max((size for first, size in _LARGEST_HEAD if major.isdigit() and int(major) >= first), default=0)
    return q.shape[-1] <= largest


def _fused(q: Array, k: Array, v: Array, causal: bool, window: int | None, scale: float) -> Array:
    narrower = q.shape[-1] - v.shape[-1]  # of multi-head latent attention; the kernel wants equal sizes
    values = jnp.pad(v, ((0, 0),) * 3 + ((0, narrower),)) if narrower else v
    looks_at = None if window is None else (window - 1, 0)
    mixed = jax.nn.dot_product_attention(
        q, k, values, is_causal=causal, scale=scale, local_window_size=looks_at, implementation="cudnn"
    )
    return mixed[..., : v.shape[-1]] if narrower else mixed


def _plain(q: Array, k: Array, v: Array, causal: bool, window: int | None, scale: float, sinks: Array | None) -> Array:
    batch, seq, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqngh,bknh->bngqk", grouped, k).astype(jnp.float32) * scale
    if causal:
        rows, columns = jnp.arange(seq)[:, None], jnp.arange(seq)[None, :]
        seen = rows >= columns
        if window is not None:
            seen &= rows - columns < window
        scores = jnp.where(seen, scores, -1e30)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = sinks.reshape(kv_heads, heads // kv_heads, 1, 1)
        top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink))
        raised = jnp.exp(scores - top)
        weights = raised / (jnp.sum(raised, axis=-1, keepdims=True) + jnp.exp(sink - top))
    mixed = jnp.einsum("bngqk,bknh->bqngh", weights.astype(q.dtype), v)
    return mixed.reshape(batch, seq, heads, v.shape[-1])
