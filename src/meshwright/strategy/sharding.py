"""Shardings of one tensor, packed into integers so that thousands are handled at once.

A sharding says for each axis of the mesh which dim of the tensor it splits, if any. Its code holds four bits an axis:
0 where the axis splits nothing, else the dim plus one. Where several axes split one dim, earlier axes are major: the
order of the mesh. Code 0 is the replicated tensor.
"""

from functools import cached_property, lru_cache
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int64]
Holders = NDArray[np.int64]  # [..., axis] → dim or -1

_BITS = 4
MAX_RANK = 2**_BITS - 2


class Axes:
    """The sizes of a mesh's axes, and the arithmetic of sharding codes on them."""

    def __init__(self, sizes: tuple[int, ...]):
        self.sizes = sizes
        self.num_axes = len(sizes)
        self.num_devices = prod(sizes)
        self.num_bits = self.num_axes * _BITS  # bits of a code
        self._shifts = np.arange(self.num_axes) * _BITS
        self._weights = 1 << self._shifts

    def pack(self, holders: Holders) -> Codes:
        """Codes of shardings given as the dim held by each axis (last array dim); -1 is none."""
        return (holders + 1) @ self._weights

    def unpack(self, codes: Codes | int) -> Holders:
        """The dim held by each axis, in a new last array dim."""
        return ((np.asarray(codes)[..., None] >> self._shifts) & (2**_BITS - 1)) - 1

    def _held(self, code: int) -> list[int]:
        """The dim held by each axis, of one sharding: for a single code arrays are slow."""
        return [((code >> (_BITS * axis)) & (2**_BITS - 1)) - 1 for axis in range(self.num_axes)]

    @cached_property
    def _parts(self) -> NDArray[np.int64]:
        codes = np.arange(1 << (_BITS * self.num_axes))
        return np.where(self.unpack(codes) >= 0, np.array(self.sizes), 1).prod(axis=-1)

    def num_parts(self, codes: Codes | int) -> NDArray[np.int64]:
        """How many distinct shards the tensor has under each sharding."""
        return self._parts[codes]

    @lru_cache(maxsize=4096)  # noqa: B019 - an Axes lives as long as its mesh is planned
    def only_cuts(self, source: int, target: int) -> bool:
        """Whether slices alone turn one sharding into another: axes that split a dim anew must be minor in it."""
        before, after = self._held(source), self._held(target)
        return all(
            was == now if was >= 0 else now < 0 or now not in before[axis + 1 :]
            for axis, (was, now) in enumerate(zip(before, after, strict=True))
        )

    def dims(self, code: int, rank: int) -> tuple[tuple[int, ...], ...]:
        """For each dim of the tensor, the axes that split it, major first."""
        dim_of_axis = self._held(code)
        return tuple(tuple(a for a, dim in enumerate(dim_of_axis) if dim == d) for d in range(rank))

    def code(self, dims: tuple[tuple[int, ...], ...]) -> int:
        """The code of a sharding given as the axes that split each dim."""
        return sum((d + 1) << (_BITS * axis) for d, axes in enumerate(dims) for axis in axes)

    @lru_cache(maxsize=4096)  # noqa: B019 - an Axes lives as long as its mesh is planned
    def legal_codes(self, shape: tuple[int, ...]) -> Codes:
        """All shardings whose shards are equal in size; axes of one device split nothing."""
        if len(shape) > MAX_RANK:
            return np.zeros(1, np.int64)
        options = [(-1, *(range(len(shape)) if n > 1 else ())) for n in self.sizes]
        legal = [
            dim_of_axis
            for dim_of_axis in product(*options)
            if all(
                size % prod((n for n, h in zip(self.sizes, dim_of_axis, strict=True) if h == dim), start=1) == 0
                for dim, size in enumerate(shape)
                if dim in dim_of_axis
            )
        ]
        return np.sort(self.pack(np.array(legal, dtype=np.int64)))
