"""Layouts by hand: which indices of a tensor each device of a mesh holds, without any of the planner's arithmetic."""

from itertools import product
from math import prod

import numpy as np

Dims = tuple[tuple[int, ...], ...]  # for each dim of a tensor, the axes that split it, major first


def devices(sizes):
    """Coordinates of every device of a mesh."""
    return list(product(*(range(n) for n in sizes)))


def block(size, axes, sizes, device):
    """The half-open range of one dim that a device holds when axes split it, major first."""
    place, parts = 0, 1
    for axis in axes:
        place = place * sizes[axis] + device[axis]
        parts *= sizes[axis]
    assert size % parts == 0
    return place * (size // parts), (place + 1) * (size // parts)


def shard(whole, dims: Dims, sizes, device):
    """The part of an array that a device holds."""
    ranges = [block(n, axes, sizes, device) for n, axes in zip(whole.shape, dims, strict=True)]
    return whole[tuple(slice(a, b) for a, b in ranges)]


def all_dims(rank, num_axes):
    """Every way to give each axis to one dim or to none, the axes of a dim in the mesh's order."""
    for held in product(range(-1, rank), repeat=num_axes):
        yield tuple(tuple(a for a, d in enumerate(held) if d == dim) for dim in range(rank))


def is_even(shape, dims: Dims, sizes):
    """Whether all shards are equal in size, and axes of one device split nothing."""
    if any(sizes[a] == 1 for axes in dims for a in axes):
        return False
    return all(size % prod(sizes[a] for a in axes) == 0 for size, axes in zip(shape, dims, strict=True))


def numbered(shape):
    """An array whose elements are all different."""
    return np.arange(prod(shape)).reshape(shape)
