"""Attention over a cache: cuDNN's kernels where the chip has them for the shapes, the scores written out elsewhere."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.zoo.attention import attend, attend_cached, why_cudnn_refuses
from meshwright.zoo.layers import Array


@dataclass(frozen=True)
class Scoring:
    """What a layer says of its attention; the arguments of `zoo.attention.attend`."""

    kind: str | None
    window: int | None
    scale: float
    sinks: Array | None
    cap: float | None


def attend_last(q: Array, k: Array, v: Array, positions: Array, options: Scoring) -> Array:
    """Attention of the last token of each sequence, over all before it.

    Args:
        q: Queries, (sequences, heads, head_dim).
        k: Keys of each sequence's positions 0, 1, 2 and so on, (sequences, length, kv_heads, head_dim).
        v: Values, the same.
        positions: Each sequence's last position, (sequences,).
        options: What the layer says.
    """
    q = q[:, None]
    if not has_kernel(q, options):
        return _plain(q, k, v, positions[:, None], options)[:, 0]
    if options.window is None:  # the kernel reads as many keys as there are, where a mask would have it read all
        mixed = jax.nn.dot_product_attention(
            q, k, v, scale=options.scale, key_value_seq_lengths=positions + 1, implementation="cudnn"
        )
    else:
        mixed = _masked(q, k, v, positions[:, None], options)
    return mixed[:, 0]


def attend_chunk(q: Array, k: Array, v: Array, positions: Array, options: Scoring) -> Array:
    """Attention of chunks of prompts, over all before and within them.

    Args:
        q: Queries, (sequences, tokens, heads, head_dim).
        k: Keys of each sequence's positions 0, 1, 2 and so on, (sequences, length, kv_heads, head_dim).
        v: Values, the same.
        positions: The position of each query, (sequences, tokens).
        options: What the layer says.
    """
    if not has_kernel(q, options):
        return _plain(q, k, v, positions, options)
    return _masked(q, k, v, positions, options)


def attend_start(q: Array, k: Array, v: Array, options: Scoring) -> Array:
    """Attention of chunks that begin their sequences, which need no cache: causal, as in training."""
    return attend(q, k, v, causal=True, **vars(options))


def has_kernel(q: Any, options: Scoring) -> bool:
    """Whether cuDNN mixes for such queries on this machine."""
    refused = jax.default_backend() != "gpu" or why_cudnn_refuses(q, options.sinks, options.cap)
    return options.kind != "plain" and not refused


def _masked(q: Array, k: Array, v: Array, positions: Array, options: Scoring) -> Array:
    """cuDNN's kernel with a mask, since its own causal one begins at position 0."""
    back = positions[:, :, None] - jnp.arange(k.shape[1])  # how far each key lies before each query
    seen = back >= 0
    if options.window is not None:
        seen &= back < options.window
    return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], scale=options.scale, implementation="cudnn")


def _plain(q: Array, k: Array, v: Array, positions: Array, options: Scoring) -> Array:
    return attend_cached(
        q, k, v, positions, window=options.window, scale=options.scale, sinks=options.sinks, cap=options.cap
    )
