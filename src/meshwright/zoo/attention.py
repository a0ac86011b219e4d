"""Attention as people train with it: one fused kernel, or the scores written out.

`"fused"` never stores the scores: cuDNN's kernel on NVIDIA GPUs, splash attention on TPUs. `"plain"` is ordinary JAX
that runs anywhere. A model that names neither takes the fused kernel where the program is traced for a chip that has
one; if the kernel refuses the shapes, the scores are written out, and the plan's remarks say so.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.graph.remarks import REMARK
from meshwright.zoo.layers import FUSED_ATTENTION, Array, capped

# The largest heads of cuDNN's kernels, from a compute capability on: there are none before Ampere. The compute
# capability of an AMD chip is no number.
_LARGEST_HEAD = ((8, 128), (9, 256))
_LANES = 128  # of TPUs: the lengths of splash attention are multiples of it


class Mix(Protocol):
    """What mixes the values of one layer's positions: `attend`, or what keeps keys and values for later tokens.

    The arguments and the result are those of `attend`. A stack of layers calls it once for each layer, in order.
    """

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        causal: bool,
        kind: str | None = None,
        window: int | None = None,
        scale: float | None = None,
        sinks: Array | None = None,
        cap: float | None = None,
    ) -> Array: ...


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
    cap: float | None = None,
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
        cap: What scores are bent to stay below; None for no cap.

    Returns:
        The mixed values, (batch, seq, heads, value_dim).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    backend = jax.default_backend()
    if kind == "plain" or (kind is None and backend not in ("gpu", "tpu")):
        return _plain(q, k, v, causal, window, scale, sinks, cap)
    refused = _why_refused(backend, q, sinks, cap)
    if kind is None and refused:
        remark = f"{REMARK}Attention's scores are written out: {refused}."
        return _plain(checkpoint_name(q, remark), k, v, causal, window, scale, sinks, cap)
    if refused and (backend == "tpu" or sinks is not None or cap is not None):  # cuDNN gives its own reasons
        raise ValueError(f"attention='fused': {refused}; use other shapes, or attention='plain'")
    if backend == "tpu":
        return _splash(q, k, v, causal, window, scale, sinks, cap)
    return _cudnn(q, k, v, causal, window, scale)


def attend_cached(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    *,
    window: int | None,
    scale: float,
    sinks: Array | None,
    cap: float | None,
) -> Array:
    """Causal attention of some positions' queries, whose keys and values lie in a cache with those of all before.

    Args:
        q: Queries, (batch, seq, heads, head_dim).
        k: Keys of the positions 0, 1, 2 and so on, (batch, length, kv_heads, head_dim); what lies behind the last
            position is not looked at, but must be finite.
        v: Values, the same.
        positions: The position of each query, (batch, seq).
        window: As in `attend`, and so are the others.
        scale: The factor of the scores.
        sinks: Scores that stand for no position.
        cap: What scores stay below.
    """
    return _plain(q, k, v, True, window, scale, sinks, cap, positions)


def _why_refused(backend: str, q: Array, sinks: Array | None, cap: float | None) -> str:
    """Why the fused kernel of the chip for which the program is traced does not take these queries; "" if it does."""
    seq = q.shape[1]
    if backend == "tpu":
        return f"splash attention takes lengths that are multiples of {_LANES}, not {seq}" if seq % _LANES else ""
    # Some versions train on even lengths only.
    odd = f"cuDNN's fused attention takes even lengths, not {seq}" if seq % 2 else ""
    return why_cudnn_refuses(q, sinks, cap) or odd


def why_cudnn_refuses(q: Array, sinks: Array | None, cap: float | None) -> str:
    """Why cuDNN's kernels do not take queries of this type and width on this chip, at any length; "" if they do."""
    head_dim = q.shape[-1]
    major = getattr(jax.devices()[0], "compute_capability", "").partition(".")[0]
    largest = max((size for first, size in _LARGEST_HEAD if major.isdigit() and int(major) >= first), default=0)
    if not largest:
        return "cuDNN has no fused attention for this chip"
    if sinks is not None:
        return "cuDNN's fused attention knows no sinks"
    if cap is not None:
        return "cuDNN's fused attention knows no caps of scores"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's fused attention takes bfloat16 and float16, not {q.dtype}"
    if head_dim % 8 or head_dim > largest:
        return f"cuDNN's fused attention takes heads of multiples of 8 up to {largest} on this chip, not {head_dim}"
    return ""


def _cudnn(q: Array, k: Array, v: Array, causal: bool, window: int | None, scale: float) -> Array:
    narrower = q.shape[-1] - v.shape[-1]  # of multi-head latent attention; the kernel wants equal sizes
    values = jnp.pad(v, ((0, 0),) * 3 + ((0, narrower),)) if narrower else v
    looks_at = None if window is None else (window - 1, 0)
    mixed = jax.nn.dot_product_attention(
        q, k, values, is_causal=causal, scale=scale, local_window_size=looks_at, implementation="cudnn"
    )
    return mixed[..., : v.shape[-1]] if narrower else mixed


def _splash(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    window: int | None,
    scale: float,
    sinks: Array | None,
    cap: float | None = None,
    interpret: bool = False,
) -> Array:
    """Splash attention for each sequence and each head of keys, with the group of query heads that shares it."""
    batch, seq, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = (q * scale).reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)
    from meshwright.zoo.splash import splash_kernel  # here, since importing kernels for TPUs takes a while

    kernel = splash_kernel(seq, heads // kv_heads, causal, window, cap, FUSED_ATTENTION, interpret)

    def attend_group(q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
        return kernel(q, k, v, sinks=sinks)

    of_heads = jax.vmap(attend_group, in_axes=(1, 1, 1, None if sinks is None else 0), out_axes=2)
    of_batch = jax.vmap(of_heads, in_axes=(0, 0, 0, None))
    tokens_last = grouped.transpose(0, 3, 2, 1, 4)  # batch, group, kv head, token, width
    own_sinks = None if sinks is None else sinks.reshape(kv_heads, -1)
    mixed = of_batch(tokens_last, k, v, own_sinks)
    return mixed.transpose(0, 2, 3, 1, 4).reshape(batch, seq, heads, v.shape[-1])


def _plain(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    window: int | None,
    scale: float,
    sinks: Array | None,
    cap: float | None = None,
    positions: Array | None = None,
) -> Array:
    """The scores written out; `positions`, (batch, seq), are those of the queries if they are not 0, 1, 2 and so on."""
    batch, seq, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqngh,bknh->bngqk", grouped, k).astype(jnp.float32) * scale
    if cap is not None:
        scores = capped(scores, cap)
    if causal:
        rows = jnp.arange(seq)[:, None] if positions is None else positions[:, None, None, :, None]
        columns = jnp.arange(k.shape[1])[None, :]
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
