"""Pages as TPUs want them: keys and values side by side, and JAX's own kernel for sequences of unequal lengths.

`ragged_paged_attention` reads the pages that tables name, as many as a sequence has,
for running sequences and for chunks of prompts alike. XLA cannot split a kernel over devices by itself, so these pages
are for models, or stages of them, that are whole on one device; others gather pages and write the scores out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshwright.serving.models.attention import Scoring, attend_chunk, attend_last
from meshwright.serving.models.caches import PagedCache, Pair
from meshwright.serving.models.work import Prompts, Running
from meshwright.zoo.layers import Array, PyTree

_LANES = 128  # of TPUs
_TILED = (1, 2, 4, 8)  # rows of a tile, or any multiple of the last


@dataclass(frozen=True)
class RaggedCache(PagedCache):
    """Blocks with keys and values in turns: one array for each layer, (blocks, tokens, 2 x kv_heads, head_dim)."""

    def arrays(self, layers: int, kv_heads: int, head_dim: int) -> PyTree:
        one = jax.ShapeDtypeStruct((self.blocks, self.block_size, 2 * kv_heads, head_dim), self.dtype)
        return [(one,) for _ in range(layers)]

    def _attend_rows(self, layer: PyTree, q: Array, rows: Running, options: Scoring) -> Array:
        if why_not_ragged(q, layer[0], options):
            k, v = self._read_pair(layer, rows.tables, q.dtype)
            return attend_last(q, k, v, rows.positions, options)
        ones = jnp.ones(len(q), jnp.int32)
        return attend_ragged(_kernel, q[:, None], layer[0], rows.tables, rows.positions, ones, options)[:, 0]

    def attend_prompts(self, layer: PyTree, q: Array, new: Pair, prompts: Prompts, options: Scoring) -> Array:
        if why_not_ragged(q, layer[0], options):
            k, v = self._read_pair(layer, prompts.tables, q.dtype)
            return attend_chunk(q, k, v, prompts.positions, options)
        return attend_ragged(_kernel, q, layer[0], prompts.tables, prompts.starts, prompts.counts, options)

    def _read_pair(self, layer: PyTree, tables: Array, dtype: DTypeLike) -> Pair:
        both = self._read(layer[0], tables)
        return both[..., 0::2, :], both[..., 1::2, :]

    def _write(self, layer: PyTree, new: Sequence[Array], tables: Array, positions: Array, active: Array) -> PyTree:
        both = jnp.stack(new, axis=-2)
        return super()._write(layer, (both.reshape(*both.shape[:-3], -1, both.shape[-1]),), tables, positions, active)


def attend_ragged(
    kernel: Callable[..., Array],
    q: Array,
    pages: Array,
    tables: Array,
    starts: Array,
    counts: Array,
    options: Scoring,
) -> Array:
    """Attention of sequences' last tokens, by a kernel that takes all queries in one line without gaps.

    Args:
        kernel: `ragged_paged_attention`, or its reference.
        q: Queries, (sequences, tokens, heads, head_dim).
        pages: What `RaggedCache` keeps of a layer, these tokens included.
        tables: The blocks of each sequence.
        starts: The position of each first token.
        counts: How many tokens there are; 0 for none, behind all others.
        options: What the layer says.

    Returns:
        The mixed values, like `q`; zeros where there is no token.
    """
    sequences, tokens = q.shape[:2]
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    inside = jnp.arange(tokens) < counts[:, None]
    place = jnp.where(inside, begins[:-1, None] + jnp.arange(tokens), sequences * tokens)
    line = q.reshape(-1, *q.shape[2:])
    if sequences > 1 < tokens:
        line = jnp.zeros_like(line).at[place].set(q, mode="drop")
    mixed = kernel(
        line,
        pages,
        (starts + counts).astype(jnp.int32),
        tables.astype(jnp.int32),
        begins,
        jnp.sum(counts > 0, dtype=jnp.int32)[None],
        sm_scale=options.scale,
        sliding_window=options.window,
        soft_cap=options.cap,
    )
    return jnp.where(inside[..., None, None], mixed.at[place].get(mode="clip"), 0).astype(q.dtype)


def why_not_ragged(q: Array, pages: Array, options: Scoring) -> str:
    """Why TPUs' kernel does not take these queries and pages; "" if it does."""
    if jax.default_backend() != "tpu" or options.kind == "plain":
        return "it is for TPUs"
    if options.sinks is not None:
        return "it knows no sinks"
    packed, left = divmod(pages.shape[2], 4 // pages.dtype.itemsize)
    if left or (packed not in _TILED and packed % _TILED[-1]):
        return f"it takes no {pages.shape[2] // 2} heads of keys"
    return f"it takes heads of multiples of {_LANES}, not {q.shape[-1]}" if q.shape[-1] % _LANES else ""


def _kernel(*given: Array, **options: object) -> Array:
    # Here, since importing kernels for TPUs takes a while.
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    result: Array = partial(ragged_paged_attention, **options)(*given)
    return result
