"""Reads parameters onto devices: each process its own parts, several parameters at a time within a bound of memory."""

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from threading import Condition
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from meshwright.hf.layout import Empty, Place, Range
from meshwright.hf.targets import Target
from meshwright.hf.tensors import Tensors
from meshwright.runtime.stages.cutting.layer_stack import LayerStack, StackSharding
from meshwright.runtime.stages.placing import absent, is_here

Bounds = tuple[Range, ...]  # a part of a parameter: a range of each dim
_READERS = 8  # threads that read at the same time
_HOST_BYTES = 2**28  # parts of parameters on the host that are not yet on their devices, unless one alone is larger
_ALIGNED = 64  # bytes; every dtype divides it


@dataclass(frozen=True)
class _Source:
    """What the checkpoint has of an array.

    Attributes:
        in_order: Whether its elements lie in the files as they do in the array.
        read: `read(bounds, empty)` reads a part of it into what `empty(shape, dtype)` gives.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    in_order: bool
    read: Callable[[Bounds, Empty], np.ndarray]

    def layers(self, first: int, last: int) -> "_Source":
        """Some layers of a stack of all."""

        def read(bounds: Bounds, empty: Empty) -> np.ndarray:
            (low, high), *others = bounds
            return self.read(((first + low, first + high), *others), empty)

        return replace(self, shape=(last - first, *self.shape[1:]), read=read)


def read_parameters(places: list[Place], targets: list[Target], tensors: Tensors, dtype: str | None) -> list[Any]:
    """The parameters of a checkpoint on the devices of their targets.

    Args:
        places: Where each parameter is in the checkpoint.
        targets: Where it goes.
        tensors: The checkpoint's.
        dtype: Of those whose targets name none; None for the checkpoint's.
    """
    memory = _Memory(_HOST_BYTES)

    def read(place: Place, target: Target) -> jax.Array | LayerStack:
        stored = stored_dtype(place, tensors)
        source = _Source(
            place.shape,
            stored,
            place.in_order,
            lambda bounds, empty: place.read(tuple(slice(*one) for one in bounds), stored, tensors.fill, empty),
        )
        wanted = np.dtype(target.dtype or dtype or stored)
        if not isinstance(target.sharding, StackSharding):
            return _placed(source, wanted, target.sharding or SingleDeviceSharding(jax.local_devices()[0]), memory)
        pieces = zip(target.sharding.bounds, target.sharding.pieces, strict=True)
        layers = [_placed(source.layers(*bounds), wanted, sharding, memory) for bounds, sharding in pieces]
        return LayerStack(layers, target.sharding)

    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(read, places, targets))


def stored_dtype(place: Place, tensors: Tensors) -> np.dtype:
    """The dtype of a parameter in the checkpoint."""
    return tensors.all[next(place.tensors())[0]].dtype


class _Memory:
    """Memory of the host that threads read into, used again and again.

    Virtual machines give out memory more slowly than a quick disk fills it, and large pages, which NumPy asks for, ten
    times more slowly still.

    Args:
        limit: The bytes that are held at the same time; what is larger waits until it is alone.
    """

    def __init__(self, limit: int):
        self._limit, self._taken, self._changed = limit, 0, Condition()
        self._free: dict[int, list[np.ndarray]] = {}

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[np.ndarray]:
        """So many bytes, of what was given back if some has this size; pages that are not touched cost nothing."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + num_bytes <= self._limit)
            self._taken += num_bytes
            if not self._free.get(num_bytes) and self._taken + self._num_free_bytes() > self._limit:
                self._free.clear()
            blocks = self._free.setdefault(num_bytes, [])
            block = blocks.pop() if blocks else _pages(num_bytes)
        try:
            yield block
        finally:
            with self._changed:
                self._taken -= num_bytes
                self._free.setdefault(num_bytes, []).append(block)
                self._changed.notify_all()

    def _num_free_bytes(self) -> int:
        return sum(size * len(blocks) for size, blocks in self._free.items())


def _pages(num_bytes: int) -> np.ndarray:
    """New memory that begins with a page, so that devices of the host can take it as it is."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, max(num_bytes, 1), flags=private), np.uint8, num_bytes)


def _new(shape: list[int], dtype: np.dtype) -> np.ndarray:
    return _pages(dtype.itemsize * prod(shape)).view(dtype).reshape(shape)


class _Parts:
    """Arrays that follow each other in one block of memory; those that exceed it have memory of their own."""

    def __init__(self, block: np.ndarray):
        self._left = block

    def empty(self, shape: list[int], dtype: np.dtype) -> np.ndarray:
        size = dtype.itemsize * prod(shape)
        if size > self._left.nbytes:
            return _new(shape, dtype)
        part, self._left = self._left[:size], self._left[_rounded(size) :]
        return part.view(dtype).reshape(shape)


def _placed(source: _Source, dtype: np.dtype, sharding: Any, memory: _Memory) -> jax.Array:
    """An array whose parts are read by the processes that hold them."""
    shape = source.shape
    if isinstance(sharding, NamedSharding) and not is_here(sharding):
        return absent(jax.ShapeDtypeStruct(shape, dtype), sharding)
    of_devices = {device: _bounds(at, shape) for device, at in sharding.addressable_devices_indices_map(shape).items()}
    parts = set(of_devices.values())
    box = tuple((min(low for low, _ in of_dim), max(high for _, high in of_dim)) for of_dim in zip(*parts, strict=True))
    # The devices of a process mostly hold parts beside each other, often columns of the same rows: one read is for all.
    together = _size(box) <= sum(map(_size, parts))
    # A device of the host takes contiguous memory as it is, which must then be new.
    shared = dtype == source.dtype and all(device.platform == "cpu" for device in of_devices)
    kept = shared and source.in_order and all(part[1:] == box[1:] for part in parts)
    with memory.taken(sum(_rounded(source.dtype.itemsize * _size(part)) for part in parts)) as block:
        empty = _new if kept else _Parts(block).empty
        arrays = {bounds: source.read(bounds, empty) for bounds in ([box] if together else parts)}

        def on_device(device: jax.Device, part: Bounds) -> jax.Array:
            outer = box if together else part
            inside = tuple(slice(low - o, high - o) for (low, high), (o, _) in zip(part, outer, strict=True))
            array = arrays[outer][inside]
            array = array.copy() if shared and not kept and array.flags.c_contiguous else array
            return jax.device_put(array, device).astype(dtype)

        shards = [on_device(device, part) for device, part in of_devices.items()]
        return jax.block_until_ready(jax.make_array_from_single_device_arrays(shape, sharding, shards))


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple((low, high) for low, high, _ in (part.indices(size) for part, size in zip(index, shape, strict=True)))


def _size(bounds: Bounds) -> int:
    return prod(high - low for low, high in bounds)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
