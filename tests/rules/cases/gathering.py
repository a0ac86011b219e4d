"""Cases of gathers and scatters.

A shard of a table shifts the indices by its own start. What then falls outside its part reads as zero (in a gather) or
is dropped (in a scatter), which is just what JAX's ``FILL_OR_DROP`` does.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from ..contract import Case, Shard
from . import Builder, Sizes

MODE = lax.GatherScatterMode
IDENTITY = {"add": 0, "sub": 0, "mul": 1, "max": -np.inf, "min": np.inf}


def _gather(table: Any, indices: np.ndarray, slice_sizes: tuple[int, ...], numbers: Any, **given: Any) -> Case:
    given = {"mode": MODE.PROMISE_IN_BOUNDS, "fill_value": None} | given

    def local(shard: Shard, x: Any, index: np.ndarray) -> np.ndarray:
        sizes = [
            min(taken, mine) if taken == whole else taken
            for taken, mine, whole in zip(slice_sizes, x.shape, table.shape, strict=True)
        ]
        shifted, outside = _shift(shard, index, numbers.start_index_map, slice_sizes, table.shape, given["mode"])
        found = lax.gather(x, shifted, numbers, tuple(sizes), mode=MODE.FILL_OR_DROP, fill_value=0)
        if given["mode"] is not MODE.FILL_OR_DROP:
            return found
        # An index outside the whole table gives the fill value, and one shard gives it.
        spread = np.expand_dims(outside, tuple(numbers.offset_dims))
        return np.where(spread, given["fill_value"] if shard.counts else 0, found)

    run = partial(lax.gather, dimension_numbers=numbers, slice_sizes=slice_sizes, **given)
    return Case(run, [table, indices], local)


def _shift(shard: Shard, index: np.ndarray, dims: Any, widths: Any, shape: Any, mode: Any) -> tuple[Any, np.ndarray]:
    """Indices as seen from the shard's first element, clamped first where the whole operation clamps."""
    index = index.copy()
    outside = np.zeros(index.shape[:-1], bool)
    for i, d in enumerate(dims):
        last = shape[d] - widths[d]
        outside |= (index[..., i] < 0) | (index[..., i] > last)
        if mode is MODE.CLIP:
            index[..., i] = index[..., i].clip(0, last)
        if widths[d] < shape[d]:
            index[..., i] -= shard.operand_start(0, d)
    return index, outside


def embedding(size: Sizes) -> Case:
    v, d, b, s = 6, *size.shape(3)
    numbers = lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return _gather(size.floats(v, d), size.ints(b, s, 1, high=v), (1, d), numbers)


def embedding_clipped(size: Sizes) -> Case:
    d, b = size.shape(2)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return _gather(size.floats(4, d), size.ints(b, 1, low=-2, high=7), (1, d), numbers, mode=MODE.CLIP)


def embedding_filled(size: Sizes) -> Case:
    d, b = size.shape(2)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    filled = {"mode": MODE.FILL_OR_DROP, "fill_value": -7.0}
    return _gather(size.floats(4, d), size.ints(b, 1, low=-2, high=7), (1, d), numbers, **filled)


def label_pick(size: Sizes) -> Case:
    """The log-probability of each token's label: the batch dims are paired."""
    b, s, v = size(), size(), 4
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(2,),
        start_index_map=(2,),
        operand_batching_dims=(0, 1),
        start_indices_batching_dims=(0, 1),
    )
    return _gather(size.floats(b, s, v), size.ints(b, s, 1, high=v), (1, 1, 1), numbers)


def two_indexed_dims(size: Sizes) -> Case:
    n = size()
    numbers = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0, 1))
    return _gather(
        size.floats(4, 6), np.concatenate([size.ints(n, 1, high=4), size.ints(n, 1, high=6)], 1), (1, 1), numbers
    )


def kept_position(size: Sizes) -> Case:
    """Looked up at one position, but the dim stays in the result."""
    n, d = size.shape(2)
    numbers = lax.GatherDimensionNumbers(offset_dims=(0, 2), collapsed_slice_dims=(), start_index_map=(0,))
    return _gather(size.floats(4, d), size.ints(n, 1, high=4), (1, d), numbers)


def partial_window(size: Sizes) -> Case:
    n, d = size.shape(2)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
    return _gather(size.floats(6, d), size.ints(n, 1, high=4), (3, d), numbers)


def of_bools(size: Sizes) -> Case:
    numbers = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    return _gather(size.bools(4), size.ints(size(), 1, high=4), (1,), numbers)


def of_keys(size: Sizes) -> Case:
    numbers = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    run = partial(lax.gather, dimension_numbers=numbers, slice_sizes=(1,), mode=MODE.PROMISE_IN_BOUNDS)
    return Case(run, [jax.random.split(jax.random.key(0), 4), size.ints(size(), 1, high=4)])


def _scatter(
    kind: str, table: np.ndarray, indices: np.ndarray, updates: np.ndarray, numbers: Any, **given: Any
) -> Case:
    function = getattr(lax, f"scatter_{kind}" if kind else "scatter")
    given = {"mode": MODE.PROMISE_IN_BOUNDS} | given
    widths = _widths(table, updates, numbers)

    def local(shard: Shard, x: np.ndarray, index: np.ndarray, update: np.ndarray) -> jax.Array:
        x = x if shard.counts else np.full_like(x, IDENTITY[kind])
        dims = numbers.scatter_dims_to_operand_dims
        shifted, _ = _shift(shard, index, dims, widths, table.shape, given["mode"])
        return function(x, shifted, update, numbers, mode=MODE.FILL_OR_DROP)

    return Case(partial(function, dimension_numbers=numbers, **given), [table, indices, updates], local)


def _widths(table: np.ndarray, updates: np.ndarray, numbers: Any) -> list[int]:
    """How much of each dim of the table one update covers."""
    windows = iter(numbers.update_window_dims)
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    return [1 if d in single else updates.shape[next(windows)] for d in range(table.ndim)]


def _rows(kind: str) -> Builder:
    def rows(size: Sizes) -> Case:
        n, d = size.shape(2)
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
        )
        return _scatter(kind, size.floats(4, d), size.ints(n, 1, high=4), size.floats(n, d), numbers)

    return rows


def unique_rows(size: Sizes) -> Case:
    d = size()
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    return _scatter("", size.floats(4, d), np.array([[2], [0]], np.int32), size.floats(2, d), numbers)


def gradient_of_label_pick(size: Sizes) -> Case:
    b, s, v = size(), size(), 4
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(2,),
        scatter_dims_to_operand_dims=(2,),
        operand_batching_dims=(0, 1),
        scatter_indices_batching_dims=(0, 1),
    )
    return _scatter("add", size.floats(b, s, v), size.ints(b, s, 1, high=v), size.floats(b, s), numbers)


def cache_update(size: Sizes) -> Case:
    """A KV cache written at another position for each sequence: a batched write of one position."""
    b, h = size.shape(2)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(1,),
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    return _scatter("", size.floats(b, 4, h), size.ints(b, 1, high=4), size.floats(b, 1, h), numbers)


def outside_dropped(size: Sizes) -> Case:
    n, d = size.shape(2)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    dropped = {"mode": MODE.FILL_OR_DROP}
    return _scatter("add", size.floats(4, d), size.ints(n, 1, low=-2, high=7), size.floats(n, d), numbers, **dropped)


def add_clipped(size: Sizes) -> Case:
    n, d = size.shape(2)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    clipped = {"mode": MODE.CLIP}
    return _scatter("add", size.floats(4, d), size.ints(n, 1, low=-2, high=7), size.floats(n, d), numbers, **clipped)


def add_windows(size: Sizes) -> Case:
    n, d = size.shape(2)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )
    return _scatter("add", size.floats(6, d), size.ints(n, 1, high=4), size.floats(n, 3, d), numbers)


GATHERS = (
    embedding,
    embedding_clipped,
    embedding_filled,
    label_pick,
    two_indexed_dims,
    kept_position,
    partial_window,
    of_bools,
    of_keys,
)
CASES: list[tuple[str, Builder]] = [
    *(("gather", build) for build in GATHERS),
    *((f"scatter-{kind}", _rows(kind)) for kind in IDENTITY),
    ("scatter", unique_rows),
    ("scatter", cache_update),
    *(("scatter-add", build) for build in (gradient_of_label_pick, outside_dropped, add_clipped, add_windows)),
]
