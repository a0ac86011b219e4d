"""Programs of one device that cut a shard into pieces, and that put pieces together to a shard.

No program here spans several devices: such programs contain no collective, so that any number of them may be in flight
(see `cpu_turns.py`), and calling one takes about as long as starting it on one device. XLA compiles for each device
anew, so all programs of a transfer are compiled side by side, in threads.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding

from meshwright.runtime.transfer.routes import Box

Program: TypeAlias = Callable[..., Any]

_NARROWEST = 4  # bits of numbers that XLA can concatenate on CPUs: of narrower ones it ends the process
_KEPT = 4096  # programs; each is a few kilobytes
_compilers = ThreadPoolExecutor(thread_name_prefix="meshwright-pieces")


@lru_cache(maxsize=_KEPT)
def cutting(boxes: tuple[Box, ...]) -> Program:
    """A program that takes a shard and returns the pieces in some boxes, which are relative to the shard."""

    def cut(shard: Any) -> tuple[Any, ...]:
        return tuple(lax.slice(shard, [start for start, _ in box], [stop for _, stop in box]) for box in boxes)

    return jax.jit(cut)


@lru_cache(maxsize=_KEPT)
def joining(boxes: tuple[Box, ...]) -> Program:
    """A program that takes the pieces of a shard, in the order of their boxes, and returns the shard."""

    def join(*pieces: Any) -> jax.Array:
        kind = pieces[0].dtype
        narrow = jnp.issubdtype(kind, jnp.integer) and jnp.iinfo(kind).bits < _NARROWEST
        wide = [piece.astype(jnp.int8) for piece in pieces] if narrow else pieces
        return _join(list(zip(boxes, wide, strict=True))).astype(kind)

    return jax.jit(join)


@lru_cache(maxsize=_KEPT)
def compiling(program: Any, shapes: tuple[tuple[int, ...], ...], dtype: Any, device: Any) -> Future[Any]:
    """Begins to compile a program for arguments on a device; calls find the executable where JAX keeps it."""
    sharding = SingleDeviceSharding(device)
    types = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes]
    lowered = program.lower(*types)  # here, since settings such as `jax.enable_x64` belong to the thread
    return _compilers.submit(lowered.compile)


def _join(pieces: Sequence[tuple[Box, Any]]) -> jax.Array:
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
