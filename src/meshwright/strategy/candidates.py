"""Strategies of one operation, derived from its loop nest: which axes split which loops, and the resulting shardings.

Assignments are arrays ``[strategy, axis] → loop or -1``; every function here handles all strategies at once.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.rules.base import REDUCING, Dims, LoopNest
from meshwright.strategy.sharding import Axes, Holders

Assignment = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The strategies of an operation that leads.

    Attributes:
        loops: ``[strategy, axis]``: the loop each axis splits, or -1.
        scatter: ``[strategy, axis]``: for an axis that splits a reducing loop, the dim of the result over which a
            reduce-scatter leaves the sum, or -1 where an all-reduce settles it.
    """

    loops: Assignment
    scatter: Holders


def enumerate_candidates(nest: LoopNest, axes: Axes, scatter: bool = True) -> Candidates:
    """Every assignment of each axis to one loop or to none, with every way to settle partial sums."""
    splittable = [i for i, loop in enumerate(nest.loops) if loop.kind != "unsplittable" and loop.size > 1]
    targets = range(len(nest.results[0])) if scatter and len(nest.results) == 1 else ()
    options: list[list[tuple[int, int]]] = []
    for size in axes.sizes:
        choices = [(-1, -1)]
        for loop in splittable if size > 1 else ():
            if nest.loops[loop].size % size == 0:
                choices.append((loop, -1))
                if nest.loops[loop].kind == "sum":
                    choices += [(loop, dim) for dim in targets]
        options.append(choices)
    chosen = np.indices([len(choices) for choices in options]).reshape(axes.num_axes, -1)  # every combination
    table = np.stack([np.array(choices)[which] for choices, which in zip(options, chosen, strict=True)], axis=1)
    loops, into = table[..., 0], table[..., 1]
    legal = (legalise(nest, axes, loops) == loops).all(axis=1)
    if targets:
        legal &= _scatters_evenly(nest, axes, loops, into)
    loops, into = loops[legal], into[legal]
    return Candidates(loops, into)


def most_split(found: Candidates, axes: Axes) -> Candidates:
    """The strategies that spread the work over the most devices."""
    parts = np.where(found.loops >= 0, np.array(axes.sizes), 1).prod(axis=1)
    return Candidates(found.loops[parts == parts.max()], found.scatter[parts == parts.max()])


def most_scattered(found: Candidates, axes: Axes, over: Collection[int]) -> NDArray[np.bool_]:
    """Which strategies scatter sums over the most devices that their loops allow, along some axes alone."""
    inside = np.isin(np.arange(axes.num_axes), sorted(over))
    scattered = found.scatter >= 0
    parts = np.where(scattered, np.array(axes.sizes), 1).prod(axis=1)
    parts[(scattered & ~inside).any(axis=1)] = 0
    _, same = np.unique(found.loops, axis=0, return_inverse=True)
    most = np.zeros(same.max() + 1, np.int64)
    np.maximum.at(most, same.ravel(), parts)
    return parts == most[same.ravel()]


def uniform(found: Candidates) -> NDArray[np.bool_]:
    """Which strategies treat so many neighbouring axes alike that a mesh of two axes has them, too."""
    one, next_one = slice(None, -1), slice(1, None)
    alike = found.loops[:, one] == found.loops[:, next_one]
    alike &= found.scatter[:, one] == found.scatter[:, next_one]
    return alike.sum(axis=1) >= max(1, found.loops.shape[1] - 2)


def legalise(nest: LoopNest, axes: Axes, loops: Assignment) -> Assignment:
    """Takes axes off loops that they cannot split: unsplittable, uneven, or not major-most in a merged dim."""
    kept = loops.copy()
    unsplittable = [loop.kind == "unsplittable" for loop in nest.loops]
    if any(unsplittable):
        kept[np.array([*unsplittable, False])[kept]] = -1
    if nest.mixing.ring >= 0:
        beside = {
            loop for dims in (*nest.operands, *nest.results) for dim in dims if nest.mixing.ring in dim for loop in dim
        }
        in_ring = (kept == nest.mixing.ring).any(axis=1, keepdims=True)
        kept[in_ring & np.isin(kept, sorted(beside - {nest.mixing.ring}))] = -1
    used = np.bincount(kept.ravel() + 1, minlength=len(nest.loops) + 1)[1:].tolist()
    for i, loop in enumerate(nest.loops):
        if not used[i] or loop.size % axes.num_devices == 0:  # then any axes split it evenly
            continue
        parts = np.ones(len(kept), np.int64)
        for axis, size in enumerate(axes.sizes):
            on = kept[:, axis] == i
            uneven = on & (loop.size % (parts * size) != 0)
            kept[uneven, axis] = -1
            parts[on & ~uneven] *= size
    for dims in (*nest.operands, *nest.results):
        for dim in dims:
            if len(dim) > 1:
                _drop_minor(nest, axes, kept, dim)
    return kept


def _drop_minor(nest: LoopNest, axes: Axes, kept: Assignment, dim: tuple[int, ...]) -> None:
    """In a merged dim a loop may be split only where earlier axes split all more major loops to single iterations."""
    for place, loop in enumerate(dim):
        major = [m for m in dim[:place] if nest.loops[m].size > 1 and loop != nest.mixing.ring]
        for axis in range(axes.num_axes):
            on = kept[:, axis] == loop
            if not on.any():
                continue
            for m in major:
                parts = np.where(kept[:, :axis] == m, np.array(axes.sizes[:axis]), 1).prod(axis=1)
                kept[on & (parts != nest.loops[m].size), axis] = -1
            # Earlier axes are major: this axis must not split a loop that is major to a loop that one of them splits.
            minor = dim[place + 1 :]
            for later in range(axis):
                kept[(kept[:, axis] == loop) & np.isin(kept[:, later], minor), axis] = -1


def follow(nest: LoopNest, axes: Axes, dims: Dims, holders: Holders) -> Assignment:
    """The assignment that splits loops as one of the tensors (of the given dims) is split."""
    loops = np.full(holders.shape, -1, np.int64)
    for d, dim in enumerate(dims):
        real = [loop for loop in dim if nest.loops[loop].size > 1]
        if len(real) == 1:
            loops[holders == d] = real[0]
        elif real:
            _follow_merged(nest, axes, holders == d, real, loops)
    return legalise(nest, axes, loops)


def _follow_merged(nest: LoopNest, axes: Axes, held: NDArray[np.bool_], dim: list[int], loops: Assignment) -> None:
    """Gives the axes of a merged dim to its loops, major first, and moves to the next loop when one is fully split."""
    place = np.zeros(len(held), np.int64)
    left = np.full(len(held), nest.loops[dim[0]].size, np.int64)
    sizes = np.array([nest.loops[loop].size for loop in dim] + [1], np.int64)
    names = np.array([*dim, -1], np.int64)
    for axis, size in enumerate(axes.sizes):
        used_up = held[:, axis] & (left == 1)
        place[used_up] = np.minimum(place[used_up] + 1, len(dim))
        left[used_up] = sizes[place[used_up]]
        on = held[:, axis] & (left % size == 0) & (place < len(dim))
        loops[on, axis] = names[place[on]]
        left[on] //= size
        place[held[:, axis] & ~on] = len(dim)  # more minor loops can no longer be split
        left[held[:, axis] & ~on] = 0


def tensor_holders(dims: Dims, loops: Assignment, num_loops: int) -> Holders:
    """The dim of a tensor that each axis holds under an assignment."""
    dim_of_loop = np.full(num_loops + 1, -1, np.int64)
    for d, dim in enumerate(dims):
        for loop in dim:
            dim_of_loop[loop] = d
    return dim_of_loop[loops]


def reducing_axes(nest: LoopNest, loops: Assignment, dims: Dims) -> NDArray[np.bool_]:
    """``[strategy, axis]``: whether the axis splits a reducing loop, so that a result of these dims is partial."""
    indexed = {loop for dim in dims for loop in dim}
    partial = [loop.kind in REDUCING and i not in indexed for i, loop in enumerate(nest.loops)]
    return np.array([*partial, False])[loops]


def keeps_apart(nest: LoopNest, loops: Assignment) -> NDArray[np.bool_]:
    """For each strategy, whether each device's contribution to a sum needs no data from its neighbours' shards."""
    reaches = np.array([*(loop.halo > 0 for loop in nest.loops), False])[loops]
    return np.equal(reaches.sum(axis=1), 0)


def result_holders(nest: LoopNest, loops: Assignment, scatter: Holders, result: int) -> Holders:
    """The dims of a result that the axes hold once partial sums are settled."""
    unsettled = tensor_holders(nest.results[result], loops, len(nest.loops))
    return np.where(scatter >= 0, scatter, unsettled) if result == 0 else unsettled


def settlements(
    partial: NDArray[np.bool_], scatter: Holders | None
) -> list[tuple[str, tuple[int, ...], NDArray[np.bool_]]]:
    """The collectives that settle partial sums, in order: kind, axes, and which strategies have it.

    There is one reduce-scatter for each dim of the result that is split, the innermost axes first, since these have the
    faster links and leave a part of the buffer to the others; then one all-reduce over all other axes.

    Args:
        partial: ``[strategy, axis]``: the axes that the result is a partial sum over.
        scatter: See `Candidates`; None where no sum is scattered.
    """
    collectives, bits = [], 1 << np.arange(partial.shape[1])
    into = np.full(partial.shape, -1, np.int64) if scatter is None else np.where(partial, scatter, -1)
    for last in reversed(range(partial.shape[1])):
        alike = (into >= 0) & (into == into[:, [last]])
        masks = np.where(alike[:, last + 1 :].any(axis=1), 0, alike @ bits)
        collectives += [("reduce_scatter", *item) for item in _by_axes(masks, partial.shape[1])]
    return collectives + [("all_reduce", *item) for item in _by_axes((partial & (into < 0)) @ bits, partial.shape[1])]


def _by_axes(masks: NDArray[np.int64], num_axes: int) -> list[tuple[tuple[int, ...], NDArray[np.bool_]]]:
    """The sets of axes that occur among bit masks, the empty one aside, each with where it does."""
    kinds = [mask for mask in np.unique(masks).tolist() if mask]
    return [(tuple(a for a in range(num_axes) if mask >> a & 1), masks == mask) for mask in kinds]


def _scatters_evenly(nest: LoopNest, axes: Axes, loops: Assignment, scatter: Holders) -> NDArray[np.bool_]:
    """Whether the shards after each reduce-scatter are even, and the scattered axis is the minor-most of its dim."""
    unsettled = tensor_holders(nest.results[0], loops, len(nest.loops))
    after = np.where(scatter >= 0, scatter, unsettled)
    good = np.ones(len(loops), bool)
    sizes = np.array(axes.sizes)
    for d, dim in enumerate(nest.results[0]):
        size = int(np.prod([nest.loops[loop].size for loop in dim]))
        good &= size % np.where(after == d, sizes, 1).prod(axis=1) == 0
        for axis in range(axes.num_axes):
            later = (unsettled[:, axis + 1 :] == d).any(axis=1)
            good &= ~((scatter[:, axis] == d) & later)
    return good
