"""Moves between processes by collective permutes over all devices that send or receive: the fallback.

It needs nothing but XLA's collectives (NCCL, Gloo), but all processes meet in one program, so that the senders wait for
the receivers. A device sends one piece and receives one in each *round*; the pieces of a round are padded to the
longest. On CPUs the program runs in its turn (`cpu_turns.py`). A process that dies in it is noticed by `mw.initialize`,
or else by JAX's heartbeat alone.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.errors import ProcessError
from meshwright.runtime.cpu_turns import in_turn
from meshwright.runtime.transfer.routes import Move


class Permutes:
    """A `Transport` between processes by one program of collective permutes; it cannot be interrupted."""

    def __init__(self, moves: Sequence[Move], dtype: Any, timeout_s: float):
        del timeout_s  # nothing interrupts a program that waits for a process
        here = jax.process_index()
        devices: set[Any] = {device for move in moves for device in (move.source, move.target)}
        order = sorted(devices, key=lambda device: (device.process_index, device.id))
        self._mesh = Mesh(np.array(order), ("device",))
        self._here = [device for device in order if device.process_index == here]
        self._rounds = _rounds(moves)
        self._lengths = [max(math.prod(move.shape) for move in each) for each in self._rounds]
        self._zeros = {
            (device, length): jax.device_put(np.zeros(length, dtype), device)
            for length in set(self._lengths)
            for device in self._here
        }
        self._sent = [move for move in moves if move.source in self._here]
        self._received = [move for move in moves if move.target in self._here]
        self._run = in_turn(self._program({device: place for place, device in enumerate(order)}), order)

    def exchange(self, sent: Sequence[Any]) -> list[Any]:
        """See `Transport`."""
        pieces = {(move.source, move.box): piece for move, piece in zip(self._sent, sent, strict=True)}
        packed = [self._pack(*each, pieces) for each in zip(self._rounds, self._lengths, strict=True)]
        with self._naming_processes():
            moved = self._run(*packed)
        found: dict[Move, Any] = {}
        for each, array in zip(self._rounds, moved, strict=True):
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            found |= {m: _unpacking(m.shape)(shards[m.target]) for m in each if m.target in shards}
        return [found[move] for move in self._received]

    def wait(self, received: Sequence[Any]) -> None:
        """See `Transport`."""
        with self._naming_processes():
            jax.block_until_ready(list(received))

    @contextmanager
    def _naming_processes(self) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            processes = sorted({device.process_index for device in self._mesh.devices.flat})
            raise ProcessError(
                f"one of the processes {', '.join(map(str, processes))} ended or failed while they moved an array "
                f"({str(error).splitlines()[0]:.200}); its own output may say why"
            ) from error

    def _pack(self, moves: Sequence[Move], length: int, pieces: Mapping[Any, Any]) -> jax.Array:
        """One array with what each device sends in a round, and zeros where it sends nothing."""
        boxes = {move.source: move.box for move in moves}
        shards = [
            _packing(length)(pieces[device, boxes[device]]) if device in boxes else self._zeros[device, length]
            for device in self._here
        ]
        sharding = NamedSharding(self._mesh, PartitionSpec("device"))
        return jax.make_array_from_single_device_arrays((self._mesh.size * length,), sharding, shards)

    def _program(self, places: Mapping[Any, int]) -> Callable[..., Any]:
        pairs = [[(places[move.source], places[move.target]) for move in each] for each in self._rounds]

        def move_all(*packed: Any) -> tuple[Any, ...]:
            return tuple(lax.ppermute(array, "device", to) for array, to in zip(packed, pairs, strict=True))

        spec = PartitionSpec("device")
        return jax.jit(jax.shard_map(move_all, mesh=self._mesh, in_specs=spec, out_specs=spec))


def _rounds(moves: Sequence[Move]) -> list[list[Move]]:
    """Moves in rounds: each is in the first one in which its source sends nothing yet and its target receives none."""
    rounds: list[list[Move]] = []
    for move in moves:
        for members in rounds:
            if all(other.source != move.source and other.target != move.target for other in members):
                members.append(move)
                break
        else:
            rounds.append([move])
    return rounds


@lru_cache
def _packing(length: int) -> Callable[[Any], Any]:
    return jax.jit(lambda piece: jnp.pad(piece.reshape(-1), (0, length - piece.size)))


@lru_cache
def _unpacking(shape: tuple[int, ...]) -> Callable[[Any], Any]:
    return jax.jit(lambda packed: packed[: math.prod(shape)].reshape(shape))
