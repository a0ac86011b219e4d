"""What keeps the keys and values of earlier tokens: pages that sequences share, or one contiguous slot for each.

Both are plain data that says which arrays there are (`arrays`) and how a layer writes and reads them (`Writer`). Keys
and values are arrays of their own for each layer: stacked ones are copied by each write.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Protocol

import jax.numpy as jnp
from jax.typing import DTypeLike

from meshwright.serving.models.attention import Scoring, attend_chunk, attend_last, attend_start
from meshwright.serving.models.eight_bits import kept, kept_types, recovered
from meshwright.serving.models.work import Prompts, Running
from meshwright.zoo.layers import Array, PyTree

Pair = tuple[Array, Array]


class Cache(Protocol):
    """The contract of both kinds."""

    @property
    def dtype(self) -> str:
        """What keys and values are kept in; "int8" and "float8" with a scale for each vector of a head."""

    @property
    def least_rows(self) -> int:
        """The fewest running sequences for which a step is compiled."""

    @property
    def described(self) -> str:
        """What it is, in words."""

    def width(self, max_len: int) -> int:
        """Blocks in the table of a sequence of so many tokens."""

    def arrays(self, layers: int, kv_heads: int, head_dim: int) -> PyTree:
        """The types of the arrays of all layers: for each a pair of keys and values, or what `kept_types` says."""

    def write_prompts(self, layer: PyTree, new: Pair, prompts: Prompts) -> PyTree:
        """Keeps the keys and values of chunks of prompts; returns the layer's arrays.

        A step writes all before it reads any: what a kernel reads is copied where a later write has no order to it. So
        this comes first, and then `mix_rows`.
        """

    def mix_rows(self, layer: PyTree, q: Array, new: Pair, rows: Running, options: Scoring) -> tuple[Array, PyTree]:
        """Keeps those of the last token of each running sequence, and mixes its values by that token's queries.

        Queries and what is returned with the layer's arrays are (rows, heads, head_dim).
        """

    def attend_prompts(self, layer: PyTree, q: Array, new: Pair, prompts: Prompts, options: Scoring) -> Array:
        """Mixes the values of chunks of prompts by their queries, (sequences, tokens, heads, head_dim)."""

    def take(self, layer: PyTree, place: Array, length: int, dtype: str) -> Pair:
        """Keys and values of one sequence's first positions, (length, kv_heads, head_dim); see `Decoder.take`."""

    def put(self, layer: PyTree, pair: Pair, place: Array) -> PyTree:
        """The reverse: a layer's arrays with them."""


@dataclass(frozen=True)
class PagedCache:
    """Blocks of `block_size` tokens that the tables of sequences name, so that prefixes can be shared."""

    blocks: int
    block_size: int
    dtype: str
    least_rows: ClassVar[int] = 1

    @property
    def described(self) -> str:
        return f"{self.blocks} blocks of {self.block_size} tokens, which prompts that begin alike share"

    def width(self, max_len: int) -> int:
        return -(-max_len // self.block_size)

    def arrays(self, layers: int, kv_heads: int, head_dim: int) -> PyTree:
        return [kept_types(self.dtype, (self.blocks, self.block_size, kv_heads, head_dim)) for _ in range(layers)]

    def write_prompts(self, layer: PyTree, new: Pair, prompts: Prompts) -> PyTree:
        return self._write(layer, new, prompts.tables[:, None], prompts.positions, prompts.active)

    def mix_rows(self, layer: PyTree, q: Array, new: Pair, rows: Running, options: Scoring) -> tuple[Array, PyTree]:
        layer = self._write(layer, new, rows.tables[:, None], rows.positions[:, None], rows.active[:, None])
        return self._attend_rows(layer, q, rows, options), layer

    def _attend_rows(self, layer: PyTree, q: Array, rows: Running, options: Scoring) -> Array:
        k, v = self._read_pair(layer, rows.tables, q.dtype)
        return attend_last(q, k, v, rows.positions, options)

    def attend_prompts(self, layer: PyTree, q: Array, new: Pair, prompts: Prompts, options: Scoring) -> Array:
        if prompts.fresh:
            return attend_start(q, *recovered(kept(self.dtype, new), q.dtype), options)
        k, v = self._read_pair(layer, prompts.tables, q.dtype)
        return attend_chunk(q, k, v, prompts.positions, options)

    def take(self, layer: PyTree, place: Array, length: int, dtype: str) -> Pair:
        k, v = (values[0, :length] for values in self._read_pair(layer, place[None, 2:], dtype))
        return k, v

    def put(self, layer: PyTree, pair: Pair, place: Array) -> PyTree:
        positions = jnp.arange(len(pair[0]))[None]
        return self._write(layer, pair, place[None, None, 2:], positions, positions < place[0])

    def _write(self, layer: PyTree, new: Sequence[Array], tables: Array, positions: Array, active: Array) -> PyTree:
        """Writes tokens at (sequence, token); those that are not active go past the end, where writes are dropped."""
        at = jnp.minimum(positions // self.block_size, tables.shape[-1] - 1)
        block = jnp.take_along_axis(jnp.broadcast_to(tables, (*at.shape, tables.shape[-1])), at[..., None], axis=-1)
        block = jnp.where(active, block[..., 0], self.blocks)
        offset = positions % self.block_size
        return tuple(
            pages.at[block, offset].set(values.reshape(*at.shape, *pages.shape[2:]).astype(pages.dtype), mode="drop")
            for pages, values in zip(layer, kept(self.dtype, new), strict=True)
        )

    def _read_pair(self, layer: PyTree, tables: Array, dtype: DTypeLike) -> Pair:
        return recovered([self._read(pages, tables) for pages in layer], dtype)

    def _read(self, pages: Array, tables: Array) -> Array:
        """The pages of each sequence one after the other, (sequences, length, kv_heads, head_dim)."""
        gathered = pages.at[tables].get(mode="clip")
        return gathered.reshape(tables.shape[0], -1, *pages.shape[2:])


@dataclass(frozen=True)
class SlotCache:
    """A contiguous place of `length` tokens for each sequence, as cuDNN's kernels want it; the row is the slot.

    The slots are in several `banks`: a step with few sequences reads only the first ones, since a kernel reads a tile
    of keys even of a slot that nobody uses.
    """

    banks: tuple[int, ...]
    length: int
    dtype: str
    least_rows: ClassVar[int] = 1

    @property
    def described(self) -> str:
        return f"{sum(self.banks)} slots of {self.length} tokens, contiguous for the kernels of attention"

    def width(self, max_len: int) -> int:
        return 0

    @property
    def starts(self) -> Sequence[int]:
        """The first slot of each bank."""
        return (0, *accumulate(self.banks))[:-1]

    def arrays(self, layers: int, kv_heads: int, head_dim: int) -> PyTree:
        banks = [kept_types(self.dtype, (slots, self.length, kv_heads, head_dim)) for slots in self.banks]
        return [tuple(banks) for _ in range(layers)]

    def mix_rows(self, layer: PyTree, q: Array, new: Pair, rows: Running, options: Scoring) -> tuple[Array, PyTree]:
        layer = self.write_rows(layer, new, rows)
        return self.attend_rows(layer, q, rows, options), layer

    def write_rows(self, layer: PyTree, new: Pair, rows: Running) -> PyTree:
        """The first half of `mix_rows`."""
        banks, stored = [], kept(self.dtype, new)
        for start, slots, bank in zip(self.starts, self.banks, layer, strict=True):
            here = slice(start, start + slots)
            place = jnp.where(rows.active[here], rows.positions[here], self.length)
            reached = start < len(rows.slots)
            banks.append(_written(bank, jnp.arange(slots), place, [one[here] for one in stored]) if reached else bank)
        return tuple(banks)

    def write_prompts(self, layer: PyTree, new: Pair, prompts: Prompts) -> PyTree:
        banks, stored = [], kept(self.dtype, new)
        for start, slots, bank in zip(self.starts, self.banks, layer, strict=True):
            inside = (prompts.slots >= start) & (prompts.slots < start + slots)
            row = jnp.where(inside, prompts.slots - start, slots + jnp.arange(len(inside)))[:, None]
            past = self.length + jnp.arange(prompts.tokens.shape[1])
            place = jnp.where(prompts.active, prompts.positions, past)
            banks.append(_written(bank, row, place, stored))
        return tuple(banks)

    def attend_rows(self, layer: PyTree, q: Array, rows: Running, options: Scoring) -> Array:
        """The second."""
        mixed = []
        for start, slots, bank in zip(self.starts, self.banks, layer, strict=True):
            if start < len(q):
                k, v = recovered(bank, q.dtype)
                here = slice(start, start + slots)
                mixed.append(attend_last(q[here], k, v, rows.positions[here], options))
        return jnp.concatenate(mixed) if len(mixed) > 1 else mixed[0]

    def attend_prompts(self, layer: PyTree, q: Array, new: Pair, prompts: Prompts, options: Scoring) -> Array:
        if prompts.fresh:
            return attend_start(q, *recovered(kept(self.dtype, new), q.dtype), options)
        k, v = recovered(self._read_all(layer, prompts.slots), q.dtype)
        return attend_chunk(q, k, v, prompts.positions, options)

    def copied(self, layer: PyTree, source: Array, target: Array) -> PyTree:
        """A layer's arrays with the whole of one slot copied to another, so that a prompt begins with its prefix."""
        banks, new = [], [array[0] for array in self._read_all(layer, source[None])]
        for start, slots, bank in zip(self.starts, self.banks, layer, strict=True):
            row = jnp.where((target >= start) & (target < start + slots), target - start, slots)
            banks.append(tuple(array.at[row].set(one, mode="drop") for array, one in zip(bank, new, strict=True)))
        return tuple(banks)

    def take(self, layer: PyTree, place: Array, length: int, dtype: str) -> Pair:
        k, v = (values[0, :length] for values in recovered(self._read_all(layer, place[1:2]), dtype))
        return k, v

    def put(self, layer: PyTree, pair: Pair, place: Array) -> PyTree:
        positions, banks, stored = jnp.arange(len(pair[0])), [], kept(self.dtype, pair)
        for start, slots, bank in zip(self.starts, self.banks, layer, strict=True):
            row = jnp.where((place[1] >= start) & (place[1] < start + slots), place[1] - start, slots)
            banks.append(_written(bank, row, positions, stored))
        return tuple(banks)

    def _read_all(self, layer: PyTree, slots: Array) -> list[Array]:
        """All that is kept of some sequences."""
        return [self._read(banks, slots) for banks in zip(*layer, strict=True)]

    def _read(self, banks: Sequence[Array], slots: Array) -> Array:
        """The places of some sequences, (sequences, length, ...)."""
        read = banks[0].at[slots].get(mode="clip")
        for start, bank in zip(self.starts[1:], banks[1:], strict=True):
            beyond = (slots >= start).reshape(-1, *[1] * (bank.ndim - 1))
            read = jnp.where(beyond, bank.at[slots - start].get(mode="clip"), read)
        return read


def _written(bank: Pair, rows: Array, places: Array, new: Sequence[Array]) -> tuple[Array, ...]:
    """Keys and values with some tokens written, each to a place of its own; rows or places past the end are dropped."""
    return tuple(
        array.at[rows, places].set(values.astype(array.dtype), mode="drop", unique_indices=True)
        for array, values in zip(bank, new, strict=True)
    )
