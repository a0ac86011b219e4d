"""Contiguous slots on NVIDIA GPUs: one Triton kernel that keeps the token of each running sequence and looks back.

A program takes one sequence, one head of keys and one part of the context, so that a single long sequence fills the
chip as well as hundreds of short ones; where there are several parts, a second small kernel joins them. The first part
looks at the new token itself, which it has at hand, and writes it to the cache: no program reads what another writes.
A row without a sequence costs next to nothing, so that slots need no order and a step no banks. Of a cache in 8 bits
the products are with the small numbers, and the scales of keys and values multiply scores and weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from meshwright.serving.models.attention import Scoring
from meshwright.serving.models.caches import Pair, SlotCache
from meshwright.serving.models.eight_bits import EIGHT_BITS, kept, recovered
from meshwright.serving.models.work import Running
from meshwright.zoo.layers import Array, PyTree

_LINES = 16  # the fewest rows of a matrix unit's product: the queries of a group are padded to them
_MOST_PARTS = 32
#: Of NVIDIA's chips: the first with products of bfloat16, and with numbers of 8 bits that are no integers.
_CAPABILITY, _OF_FLOAT8 = 8.0, 8.9
_LOG2_E = 1.4426950408889634  # powers of two are one instruction
_LOWEST = -1e30  # of scores: what nobody looks at


@dataclass(frozen=True)
class Tiling:
    """How a kernel is cut up; `benchmarks/serving_attention.py` measures others.

    On an H200 a layer of Llama-3-8B at a context of 1,024 takes 69 µs with 64 sequences and two stages, 75 with three;
    261 with 256, and 256 where programs of one sequence run together.

    Attributes:
        programs: So many fill a chip: contexts are cut into parts until there are as many.
        numbers: Numbers of keys that a program loads together; all loads under way must fit into a processor's memory.
        warps: Warps of a program.
        stages: Loads of keys that are under way at once.
    """

    programs: int = 512
    numbers: int = 64 * 128
    warps: int = 4
    stages: int = 2

    def parts(self, sequences: int, blocks: int) -> int:
        """Into how many parts contexts of so many blocks of keys are cut, by the number of sequences and heads.

        >>> Tiling().parts(8, 32), Tiling().parts(8, 2), Tiling().parts(512, 32), Tiling().parts(2048, 32)
        (32, 2, 1, 1)
        """
        return pl.next_power_of_2(min(_MOST_PARTS, blocks, pl.cdiv(self.programs, sequences)))


@dataclass(frozen=True)
class TritonCache(SlotCache):
    """Slots, in one bank, of a model or a stage of it that is whole on one GPU: XLA cannot split a kernel by itself."""

    # Of one row XLA 0.11 makes the products for keys and values into sums: one multiplies all weights out to memory,
    # the other is computed within the concatenation below. Of eight rows it joins them with the queries'; idle rows
    # cost nothing. (Seen in what is compiled for an H200, where a step of Llama-3-8B took 11.3 ms on a busy host.)
    least_rows: ClassVar[int] = 8

    def mix_rows(self, layer: PyTree, q: Array, new: Pair, rows: Running, options: Scoring) -> tuple[Array, PyTree]:
        on_cpu = jax.default_backend() == "cpu"  # which only tests are
        stored = kept(self.dtype, new)
        mixed, bank = attend_and_keep(q, stored, layer[0], rows.at, options, interpret=on_cpu)
        return mixed, (bank,)


def has_kernel(dtype: str, stored: str, head_dim: int) -> bool:
    """Whether this machine's GPU runs the kernel: its matrix units take 16 bits, sixteen numbers at the least."""
    gpu = jax.local_devices()[0]
    capability = float(getattr(gpu, "compute_capability", 0)) if gpu.platform == "gpu" else 0.0
    least = _OF_FLOAT8 if stored == "float8" else _CAPABILITY
    types = dtype in ("bfloat16", "float16") and stored in (dtype, *EIGHT_BITS)
    return capability >= least and types and head_dim >= _LINES


def attend_and_keep(
    q: Array,
    new: Sequence[Array],
    cache: Sequence[Array],
    at: Array,
    options: Scoring,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[Array, tuple[Array, ...]]:
    """Attention of the last token of each sequence, which is written to the cache.

    Args:
        q: Queries, (rows, heads, head_dim).
        new: Keys and values of the tokens, (rows, kv_heads, head_dim); in 8 bits with their scales, (rows, kv_heads).
        cache: Those of at least as many slots, (slots, length, kv_heads, head_dim), likewise; a row is a slot.
        at: The position of each token, (rows,); -1 for a row without a sequence, of which nothing is written.
        options: What the layer says.
        tiling: How the kernel is cut up.
        interpret: Whether it runs as ordinary operations, which any device can.

    Returns:
        The mixed values, like `q`, and the cache.
    """
    tiling = tiling or Tiling()
    (rows, heads, width), (_, length, kv_heads, _) = q.shape, cache[0].shape
    group, wide = heads // kv_heads, pl.next_power_of_2(width)
    keys = tiling.numbers // wide
    parts = tiling.parts(rows * kv_heads, pl.cdiv(length, keys))
    lines = pl.next_power_of_2(max(group, _LINES))
    in_cache = [pl.BlockSpec((None, length, None, wide), lambda head, row, part: (row, 0, head, 0))] * 2
    in_cache += [pl.BlockSpec((None, length, None), lambda head, row, part: (row, 0, head))] * (len(cache) - 2)
    # One array of all three: XLA rotates queries and keys and cuts out values in one kernel then, not in three.
    qkv = jnp.concatenate([q, *(one.astype(q.dtype) for one in recovered(new, q.dtype))], axis=1)
    in_specs = [
        pl.BlockSpec((1,), lambda head, row, part: (row,)),
        pl.BlockSpec((None, qkv.shape[1], wide), lambda head, row, part: (row, 0, 0)),
        *in_cache,
    ]
    given = [at, qkv, *cache]
    if len(cache) > 2:
        in_specs += [pl.BlockSpec((None, None, wide), lambda head, row, part: (row, head, 0))] * 2
        in_specs += [pl.BlockSpec((None, 1), lambda head, row, part: (row, head))] * 2
        given += new
    if options.sinks is not None:
        in_specs.append(pl.BlockSpec((None, lines), lambda head, row, part: (head, 0)))
        given.append(options.sinks.reshape(kv_heads, group).astype(jnp.float32))
    of_part = jax.ShapeDtypeStruct((rows, kv_heads, parts, group), jnp.float32)
    mixed_type = jax.ShapeDtypeStruct((*of_part.shape, width), q.dtype if parts == 1 else jnp.float32)
    sums = pl.BlockSpec((None, None, None, lines), lambda head, row, part: (row, head, part, 0))
    mixed_spec = pl.BlockSpec((None, None, None, lines, wide), lambda head, row, part: (row, head, part, 0, 0))
    sizes = {"arrays": len(cache), "width": width, "group": group, "parts": parts, "keys": keys}
    made = pl.pallas_call(
        partial(_look_back, options=options, **sizes),
        grid=(kv_heads, rows, parts),  # programs of one sequence run together, since its heads lie side by side
        in_specs=in_specs,
        out_specs=[*in_cache, mixed_spec, *[sums] * (2 * (parts > 1))],
        out_shape=[*(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in cache), mixed_type]
        + [of_part] * (2 * (parts > 1)),
        input_output_aliases={2 + number: number for number in range(len(cache))},
        compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name="attend_and_keep",
    )(*given)
    bank, (mixed, *summed) = made[: len(cache)], made[len(cache) :]
    if parts > 1:
        tops, totals = summed
        mixed = _joined(mixed, tops, totals, q.dtype, interpret)
    return mixed.reshape(q.shape), tuple(bank)


def _look_back(at_ref: Any, qkv_ref: Any, *refs: Any, arrays: int, **options: Any) -> None:
    """One part of the context of one sequence and head of keys: the sum of values, by scores relative to the top."""
    scoring, keys, parts, group = (options[name] for name in ("options", "keys", "parts", "group"))
    given = iter(refs)
    k_ref, v_ref, *scale_refs = islice(given, arrays)
    new_refs = list(islice(given, arrays if scale_refs else 0))
    sink_ref = None if scoring.sinks is None else next(given)
    kept_refs, (mixed_ref, *sum_refs) = list(islice(given, arrays)), list(given)
    head, part, at = pl.program_id(0), pl.program_id(2), at_ref[0]
    kv_heads = qkv_ref.shape[0] // (group + 2)
    columns, lines = jnp.arange(k_ref.shape[-1]) < options["width"], jnp.arange(mixed_ref.shape[0]) < group
    inside = lines[:, None] & columns[None, :]
    q = triton.load(qkv_ref.at[pl.ds(head * group, len(lines)), :], mask=inside, other=0)

    def scored(products: Array) -> Array:
        scores = products * scoring.scale
        return (scores if scoring.cap is None else scoring.cap * jnp.tanh(scores / scoring.cap)) * _LOG2_E

    new_k, new_v = (
        triton.load(qkv_ref.at[(group + part_of) * kv_heads + head], mask=columns, other=0) for part_of in (0, 1)
    )
    top = scored(jnp.sum(q.astype(jnp.float32) * new_k.astype(jnp.float32)[None, :], axis=1))
    total = jnp.ones_like(top)
    weight = total
    if sink_ref is not None:
        sink, own = triton.load(sink_ref, mask=lines, other=_LOWEST) * _LOG2_E, top
        top = jnp.maximum(own, sink)
        weight = jnp.exp2(own - top)
        total = weight + jnp.exp2(sink - top)
    mixed = weight[:, None] * new_v.astype(jnp.float32)[None, :]
    first = part == 0  # the others begin with nothing
    top, total, mixed = jnp.where(first, top, _LOWEST), jnp.where(first, total, 0), jnp.where(first, mixed, 0)

    begin = 0 if scoring.window is None else jnp.maximum(at - scoring.window + 1, 0)
    each = pl.cdiv(pl.cdiv(at - begin, parts), keys) * keys
    begin += part * each
    end = jnp.minimum(begin + each, at)

    def block(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        mixed, top, total = carry
        start = begin + number * keys
        seen = start + jnp.arange(keys) < end
        place, mask = (pl.ds(start, keys), slice(None)), seen[:, None] & columns[None, :]
        k, v = (_loaded(ref.at[place], mask).astype(q.dtype) for ref in (k_ref, v_ref))
        scales = [_loaded(ref.at[place[0]], seen)[None, :] for ref in scale_refs]
        products = triton.dot(q, k.T)
        scores = jnp.where(seen[None, :], scored(products * scales[0] if scales else products), _LOWEST)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        weights, lower = jnp.exp2(scores - higher[:, None]), jnp.exp2(top - higher)
        of_values = (weights * scales[1] if scales else weights).astype(v.dtype)
        mixed = mixed * lower[:, None] + triton.dot(of_values, v)
        return mixed, higher, total * lower + jnp.sum(weights, axis=1)

    blocks = jnp.maximum(pl.cdiv(end - begin, keys), 0)
    mixed, top, total = jax.lax.fori_loop(0, blocks, block, (mixed, top, total))
    if sum_refs:
        for ref, value in zip(sum_refs, (top, total), strict=True):
            triton.store(ref, value, mask=lines)
    else:
        mixed = mixed / total[:, None]
    triton.store(mixed_ref, mixed.astype(mixed_ref.dtype), mask=inside)
    written, here = first & (at >= 0), jnp.maximum(at, 0)
    if new_refs:
        new_k, new_v = (_loaded(ref, columns) for ref in new_refs[:2])
    for ref, one in zip(kept_refs, (new_k, new_v), strict=False):
        triton.store(ref.at[here, :], one.astype(ref.dtype), mask=columns & written)
    for ref, new_ref in zip(kept_refs[2:], new_refs[2:], strict=True):
        triton.store(ref.at[pl.ds(here, 1)], new_ref[...], mask=jnp.full(1, written))


def _loaded(ref: Any, mask: Array) -> Array:
    """Numbers where a mask is, and zeros elsewhere: a zero must be one of their own kind."""
    return triton.load(ref, mask=mask, other=0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0)


def _joined(mixed: Array, tops: Array, totals: Array, dtype: Any, interpret: bool) -> Array:
    """The parts of each sequence as one."""
    rows, kv_heads, parts, group, width = mixed.shape
    lines, wide = pl.next_power_of_2(group), pl.next_power_of_2(width)
    sums = pl.BlockSpec((None, None, parts, lines), lambda row, head: (row, head, 0, 0))
    return pl.pallas_call(
        partial(_join, group=group, width=width),
        grid=(rows, kv_heads),
        in_specs=[pl.BlockSpec((None, None, parts, lines, wide), lambda row, head: (row, head, 0, 0, 0)), sums, sums],
        out_specs=pl.BlockSpec((None, None, lines, wide), lambda row, head: (row, head, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, kv_heads, group, width), dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="join_parts",
    )(mixed, tops, totals)


def _join(mixed_ref: Any, top_ref: Any, total_ref: Any, out_ref: Any, *, group: int, width: int) -> None:
    parts, lines = top_ref.shape[0], jnp.arange(out_ref.shape[0]) < group
    inside = lines[:, None] & (jnp.arange(out_ref.shape[1]) < width)[None, :]
    of_parts = jnp.broadcast_to(lines[None, :], top_ref.shape)
    tops = triton.load(top_ref, mask=of_parts, other=_LOWEST)
    top = jnp.max(tops, axis=0)
    shares = jnp.exp2(tops - top[None, :])
    total = jnp.sum(triton.load(total_ref, mask=of_parts, other=0) * shares, axis=0)

    def add(part: Array, mixed: Array) -> Array:
        share = jnp.exp2(triton.load(top_ref.at[part], mask=lines, other=_LOWEST) - top)
        return mixed + triton.load(mixed_ref.at[part], mask=inside, other=0) * share[:, None]

    mixed = jax.lax.fori_loop(0, parts, add, jnp.zeros(out_ref.shape, jnp.float32))
    triton.store(out_ref, (mixed / total[:, None]).astype(out_ref.dtype), mask=inside)
