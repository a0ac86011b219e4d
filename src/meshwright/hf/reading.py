"""Reads parameters onto devices: each process its own parts, several parameters at a time within a bound of memory."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from threading import Condition
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from meshwright.hf.layout import Place
from meshwright.hf.targets import Target
from meshwright.hf.tensors import Tensors
from meshwright.runtime.stages.cutting.layer_stack import LayerStack, StackSharding
from meshwright.runtime.stages.placing import absent, is_here

Read = Callable[[tuple[slice, ...]], np.ndarray]  # a part of a parameter, on the host
_READERS = 8  # threads that read at the same time
_HOST_BYTES = 2**29  # parts of parameters on the host that are not yet on their devices, unless one alone is larger


def read_parameters(places: list[Place], targets: list[Target], tensors: Tensors, dtype: str | None) -> list[Any]:
    """The parameters of a checkpoint on the devices of their targets.

    Args:
        places: Where each parameter is in the checkpoint.
        targets: Where it goes.
        tensors: The checkpoint's.
        dtype: Of those whose targets name none; None for the checkpoint's.
    """
    room = _Room(_HOST_BYTES)

    def read(place: Place, target: Target) -> jax.Array | LayerStack:
        stored = stored_dtype(place, tensors)
        return _parameter(place, stored, np.dtype(target.dtype or dtype or stored), target.sharding, tensors, room)

    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(read, places, targets))


def stored_dtype(place: Place, tensors: Tensors) -> np.dtype:
    """The dtype of a parameter in the checkpoint."""
    return tensors.all[next(place.tensors())[0]].dtype


class _Room:
    """The bytes that threads may hold at the same time; what is larger waits until it is alone."""

    def __init__(self, limit: int):
        self._limit, self._taken, self._changed = limit, 0, Condition()

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + num_bytes <= self._limit)
            self._taken += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._taken -= num_bytes
                self._changed.notify_all()


def _parameter(
    place: Place, stored: np.dtype, dtype: np.dtype, sharding: Any, tensors: Tensors, room: _Room
) -> jax.Array | LayerStack:
    def read(index: tuple[slice, ...]) -> np.ndarray:
        part = place.read(index, stored, tensors.fill)
        return part if dtype == stored else part.astype(dtype)

    sharding = sharding or SingleDeviceSharding(jax.local_devices()[0])
    if not isinstance(sharding, StackSharding):
        return _placed(place.shape, dtype, sharding, read, room)
    pieces = []
    for (first, last), inner in zip(sharding.bounds, sharding.pieces, strict=True):
        shape = (last - first, *place.shape[1:])
        pieces.append(_placed(shape, dtype, inner, partial(_layers, read, first, last - first), room))
    return LayerStack(pieces, sharding)


def _layers(read: Read, first: int, count: int, index: tuple[slice, ...]) -> np.ndarray:
    """A part of `count` layers of a stack, from the layer `first` on."""
    low, high, _ = index[0].indices(count)
    return read((slice(first + low, first + high), *index[1:]))


def _placed(shape: tuple[int, ...], dtype: np.dtype, sharding: Any, read: Read, room: _Room) -> jax.Array:
    """An array whose parts are read by the processes that hold them."""
    if isinstance(sharding, NamedSharding) and not is_here(sharding):
        return absent(jax.ShapeDtypeStruct(shape, dtype), sharding)
    parts = {_bounds(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()}
    box = tuple((min(low for low, _ in of_dim), max(high for _, high in of_dim)) for of_dim in zip(*parts, strict=True))
    num_bytes = dtype.itemsize * sum(map(_size, parts))
    # The devices of a process mostly hold parts beside each other, often columns of the same rows: one read is for all.
    together = dtype.itemsize * _size(box) <= num_bytes
    with room.taken(num_bytes):
        whole = read(tuple(slice(*bounds) for bounds in box)) if together else None

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # it is for arrays only that have no dims' indices
            if whole is None:
                return read(index)
            bounds = zip(_bounds(index, shape), box, strict=True)
            return whole[tuple(slice(low - first, high - first) for (low, high), (first, _) in bounds)]

        return jax.block_until_ready(jax.make_array_from_callback(shape, sharding, part, dtype=dtype))


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((low, high) for low, high, _ in (part.indices(size) for part, size in zip(index, shape, strict=True)))


def _size(bounds: tuple[tuple[int, int], ...]) -> int:
    return prod(high - low for low, high in bounds)
