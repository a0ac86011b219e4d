"""Keeps copies of checkpoints in the hosts' memory, and makes a state of those that are left after some hosts are lost.

Every process keeps what it has of the arrays. Processes that are started again may have other devices and need other
parts: of what their own host keeps they read it; of what another host keeps each byte crosses once, from device to
device. Where a part is nowhere, nothing is read from memory.
"""

import json
import math
import os
import socket
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from meshwright import jax_devices
from meshwright.runtime.transfer.choice import chosen
from meshwright.runtime.transfer.reshard import boxes
from meshwright.runtime.transfer.routes import Box, Move, find_route, relative, shape_of, volume
from meshwright.training.in_memory import files
from meshwright.training.saving.barrier import SaveBarrier

_TIMEOUT_S = 300.0  # for a process that is to send a part
Held = Sequence[Sequence[Any]]  # the pieces that some host keeps: path and box


def keep(directory: str, step: int, checksum: str, arrays: Mapping[str, Any]) -> None:
    """Keeps what this process has of a checkpoint's arrays, where the launcher provides for it."""
    if files.FOLDER not in os.environ:
        return
    pieces: dict[files.Key, np.ndarray] = {}
    for path, array in arrays.items():
        if not isinstance(array, jax.Array):
            whole = np.asarray(array)
            pieces[path, tuple((0, size) for size in whole.shape)] = whole
            continue
        for shard in array.addressable_shards:
            box = tuple(cut.indices(size)[:2] for cut, size in zip(shard.index, array.shape, strict=True))
            if (path, box) not in pieces:
                pieces[path, box] = np.asarray(shard.data)
    files.write(directory, step, jax.process_index(), checksum, list(pieces.items()))


def recall(directory: str, step: int, checksum: str, kinds: Mapping[str, Any]) -> dict[str, jax.Array] | None:
    """A checkpoint's arrays from the hosts' memory; all processes must ask together.

    Args:
        directory: The checkpoint's.
        step: Its step.
        checksum: Of its list of leaves.
        kinds: The arrays' types, with the shardings that they are to have.

    Returns:
        The arrays, or None where some part of one is in no host's memory.
    """
    barrier = SaveBarrier()
    own = files.read(directory, step, checksum)
    host = f"{socket.gethostname()} {os.environ.get(files.FOLDER)}"
    hosts: list[str] = barrier.agree("hosts", host, list)
    is_reader = hosts.index(host) == jax.process_index()
    told: list[Held] = []
    barrier.agree("held", list(own) if is_reader else [], told.extend)
    told = json.loads(jax_devices.broadcast(json.dumps(told).encode()))  # by the devices: it is long, and for all
    held = {name: _by_path(pieces) for name, pieces in zip(hosts, told, strict=True) if pieces}
    if not all(_is_whole(kind.shape, path, held) for path, kind in kinds.items()):
        return None
    memory = _Memory(own, [held.get(name, {}) for name in hosts])
    return {path: memory.array(path, kind) for path, kind in kinds.items()}


def _by_path(pieces: Held) -> dict[str, list[Box]]:
    found = defaultdict(list)
    for path, box in pieces:
        found[path].append(tuple((start, stop) for start, stop in box))
    return found


def _is_whole(shape: tuple[int, ...], path: str, held: Mapping[str, Mapping[str, Sequence[Box]]]) -> bool:
    """Whether an array's pieces, of all hosts, form a grid that leaves nothing out."""
    found = {box for pieces in held.values() for box in pieces.get(path, ())}
    num_cells = math.prod(len(set(intervals)) for intervals in zip(*found, strict=True))
    return bool(found) and num_cells == len(found) and sum(map(volume, found)) == math.prod(shape)


@dataclass(frozen=True)
class _Place:
    """A piece that a process can read."""

    process: int
    box: Box


def _process(place: Any) -> Hashable:
    return place.process if isinstance(place, _Place) else place.process_index


class _Memory:
    """What all processes can read: the pieces of each, by path; and the bytes of those that this one can read."""

    def __init__(self, own: Mapping[files.Key, memoryview], held: Sequence[Mapping[str, Sequence[Box]]]):
        self._own, self._held = own, held
        self._first: dict[int, Any] = {}  # the device of each process that sends for it
        for device in jax.devices():
            self._first.setdefault(device.process_index, device)

    def array(self, path: str, kind: Any) -> jax.Array:
        """One array, with its sharding."""
        sharding, dtype = kind.sharding, np.dtype(kind.dtype)
        needed = boxes(kind.shape, sharding)
        once: dict[tuple[int, Box], Any] = {}  # of a process's devices that need the same, one receives it
        for device, box in needed.items():
            once.setdefault((device.process_index, box), device)
        sources: dict[Hashable, Box] = {
            _Place(process, box): box for process, pieces in enumerate(self._held) for box in pieces.get(path, ())
        }
        targets: dict[Hashable, Box] = {device: box for (_, box), device in once.items()}
        route = find_route(sources, targets, dtype.itemsize, _process)
        here = jax.process_index()
        parts = {box: np.empty(shape_of(box), dtype) for process, box in once if process == here}
        crossing = []
        for move in route.fetches:
            source: Any = move.source
            if source.process != _process(move.target):
                crossing.append((source.box, Move(move.box, self._first[source.process], move.target)))
            elif source.process == here:
                box = targets[move.target]
                parts[box][_cut(move.box, box)] = self._read(path, source.box, dtype)[_cut(move.box, source.box)]
        for move, piece in self._exchange(path, dtype, crossing):
            box = targets[move.target]
            parts[box][_cut(move.box, box)] = np.asarray(piece)
        shards = [
            jax.device_put(
                parts[needed[device]], SingleDeviceSharding(device, memory_kind=sharding.memory_kind), may_alias=False
            )
            for device in needed
            if device.process_index == here
        ]
        return jax.make_array_from_single_device_arrays(kind.shape, sharding, shards, dtype=dtype)

    def _exchange(self, path: str, dtype: np.dtype, crossing: Sequence[tuple[Box, Move]]) -> list[tuple[Move, Any]]:
        """Sends what others lack, and returns what this process lacked."""
        here = jax.process_index()
        if all(here not in (_process(move.source), _process(move.target)) for _, move in crossing):
            return []
        moves = [move for _, move in crossing]
        sent = [
            jax.device_put(np.array(self._read(path, box, dtype)[_cut(move.box, box)]), move.source)
            for box, move in crossing
            if _process(move.source) == here
        ]
        transport = chosen().transport(moves, dtype, _TIMEOUT_S)
        received = transport.exchange(sent)
        transport.wait(received)
        return list(zip([move for move in moves if _process(move.target) == here], received, strict=True))

    def _read(self, path: str, box: Box, dtype: np.dtype) -> np.ndarray:
        shape = shape_of(box)
        return np.frombuffer(self._own[path, box], dtype, math.prod(shape)).reshape(shape)


def _cut(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(*interval) for interval in relative(box, outer))
