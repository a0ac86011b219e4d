"""Programs of one device that cut a shard into pieces, and that put pieces together to a shard.

No program here spans several devices: such programs contain no collective, so that any number of them may be in flight
(see `cpu_turns.py`), and calling one takes about as long as starting it on one device.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
from jax import lax

from meshwright.runtime.transfer.routes import Box

_KEPT = 4096  # programs; each is a few kilobytes


@lru_cache(maxsize=_KEPT)
def cutting(boxes: tuple[Box, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """A program that takes a shard and returns the pieces in some boxes, which are relative to the shard."""

    def cut(shard: Any) -> tuple[Any, ...]:
        return tuple(lax.slice(shard, [start for start, _ in box], [stop for _, stop in box]) for box in boxes)

    return jax.jit(cut)


@lru_cache(maxsize=_KEPT)
def joining(boxes: tuple[Box, ...]) -> Callable[..., Any]:
    """A program that takes the pieces of a shard, in the order of their boxes, and returns the shard."""

    def join(*pieces: Any) -> Any:
        return _join(list(zip(boxes, pieces, strict=True)))

    return jax.jit(join)


def _join(pieces: Sequence[tuple[Box, Any]]) -> Any:
    """Concatenates pieces along a dim in which they form slabs, and those of each slab first.

    Pieces are the cells of a grid, some of which are split once more, so there always is such a dim.
    """
    if len(pieces) == 1:
        return pieces[0][1]
    for dim in range(len(pieces[0][0])):
        slabs: list[list[tuple[Box, Any]]] = []
        end = -1
        for box, piece in sorted(pieces, key=lambda pair: pair[0][dim]):
            start, stop = box[dim]
            if start >= end:
                slabs.append([])
            slabs[-1].append((box, piece))
            end = max(end, stop)
        if len(slabs) > 1:
            return lax.concatenate([_join(slab) for slab in slabs], dim)
    raise AssertionError(f"the pieces {[box for box, _ in pieces]} do not form slabs")
