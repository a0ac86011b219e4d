"""Moves between processes by collective permutes over all devices that send or receive, on the accelerators' own links.

It needs nothing but XLA's collectives (NCCL, Gloo). All processes that have one of the devices run one program, in
the order that `schedules/order.py` gives to all transfers; the host waits for nobody, since XLA runs what reads an
array after what writes it. A device sends one piece and receives one in each *round*; unlike pieces are padded to the
longest.

Accelerators run programs in the order of their queues. CPUs do not, and two programs in flight between the same
processes would take each other's messages. So a program on CPUs reads its *turn*, a number that the last one between
these devices has written. XLA would run so cheap a program in the thread that calls it, which would wait for the other
process: a product of small matrices makes the turn dear enough to be computed elsewhere. Inside of one process programs
run as `cpu_turns.py` says. A process that dies is noticed by `mw.initialize`, or else by JAX's heartbeat alone.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.errors import ProcessError
from meshwright.runtime.cpu_turns import in_turn
from meshwright.runtime.transfer.routes import Move

_ALONG = PartitionSpec("device")
_SIDE = 8  # of the turn's product: 2 · 8³ FLOPs, and XLA's CPU client runs programs of less than 1000 at once
_turns: dict[tuple[Any, ...], jax.Array] = {}  # the turn that the next program between some CPU devices reads
_lock = Lock()  # batches are placed by another thread than the one that calls the function


class Permutes:
    """A `Transport` between processes by one program of collective permutes; it cannot be interrupted."""

    by_xla = True

    def __init__(self, moves: Sequence[Move], dtype: Any, timeout_s: float):
        del timeout_s  # nothing interrupts a program that waits for a process
        here = jax.process_index()
        devices: set[Any] = {device for move in moves for device in (move.source, move.target)}
        order = sorted(devices, key=lambda device: (device.process_index, device.id))
        self._mesh = Mesh(np.array(order), ("device",))
        self._sharding = NamedSharding(self._mesh, _ALONG)
        self._here = [device for device in order if device.process_index == here]
        self._takes_turns = order[0].platform == "cpu" and len({device.process_index for device in order}) > 1
        self._rounds = _rounds(moves)
        self._forms = [_form([move.shape for move in each]) for each in self._rounds]
        self._dtype = dtype
        self._zeros: dict[tuple[Any, tuple[int, ...]], jax.Array] = {}  # what a device sends that has nothing to send
        self._sent = [move for move in moves if move.source in self._here]
        place = {device: i for i, device in enumerate(self._here)}
        received = {
            move: (number, place[move.target], None if form == move.shape else _unpacking(move.shape))
            for number, (each, form) in enumerate(zip(self._rounds, self._forms, strict=True))
            for move in each
            if move.target in place
        }
        self._received = [received[move] for move in moves if move in received]
        self._program = self._permuting(order)
        self._run = self._program if self._takes_turns else in_turn(self._program, order)

    def exchange(self, sent: Sequence[Any]) -> list[Any]:
        """See `Transport`."""
        pieces = {(move.source, move.box): piece for move, piece in zip(self._sent, sent, strict=True)}
        packed = [self._pack(*each, pieces) for each in zip(self._rounds, self._forms, strict=True)]
        with self._naming_processes():
            moved = self._in_its_turn(packed) if self._takes_turns else self._run(*packed)
        shards = [[shard.data for shard in array.addressable_shards] for array in moved]
        found = [(shards[number][place], unpack) for number, place, unpack in self._received]
        return [piece if unpack is None else unpack(piece) for piece, unpack in found]

    def wait(self, received: Sequence[Any]) -> None:
        """See `Transport`."""
        with self._naming_processes():
            jax.block_until_ready(list(received))

    def lower(self) -> jax.stages.Lowered:
        """The program that all processes run, to be looked at; its devices may only be described."""
        types = [(self._mesh.size * form[0], *form[1:]) for form in self._forms]
        kinds = [jax.ShapeDtypeStruct(shape, self._dtype, sharding=self._sharding) for shape in types]
        if self._takes_turns:
            kinds.append(jax.ShapeDtypeStruct((self._mesh.size,), np.float32, sharding=self._sharding))
        return self._program.lower(*kinds)

    def _in_its_turn(self, packed: Sequence[jax.Array]) -> Sequence[jax.Array]:
        devices = tuple(self._mesh.devices.flat)
        with _lock:
            if devices not in _turns:
                first = [jax.device_put(np.zeros(1, np.float32), device) for device in self._here]
                _turns[devices] = jax.make_array_from_single_device_arrays((len(devices),), self._sharding, first)
            *moved, _turns[devices] = self._run(*packed, _turns[devices])
        return moved

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

    def _pack(self, moves: Sequence[Move], form: tuple[int, ...], pieces: Mapping[Any, Any]) -> jax.Array:
        """One array with what each device sends in a round, and zeros where it sends nothing."""
        sending = {move.source: move for move in moves}
        shards = []
        for device in self._here:
            move = sending.get(device)
            piece = self._nothing(device, form) if move is None else pieces[device, move.box]
            shards.append(piece if move is None or move.shape == form else _packing(form[0])(piece))
        shape = (self._mesh.size * form[0], *form[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, shards)

    def _nothing(self, device: Any, form: tuple[int, ...]) -> jax.Array:
        if (device, form) not in self._zeros:
            self._zeros[device, form] = jax.device_put(np.zeros(form, self._dtype), device)
        return self._zeros[device, form]

    def _permuting(self, order: Sequence[Any]) -> jax.stages.Wrapped:
        places = {device: place for place, device in enumerate(order)}
        pairs = [[(places[move.source], places[move.target]) for move in each] for each in self._rounds]

        def move_all(*packed: Any) -> tuple[Any, ...]:
            moved = [lax.ppermute(array, "device", to) for array, to in zip(packed, pairs, strict=False)]
            if not self._takes_turns:
                return tuple(moved)
            grid = lax.broadcasted_iota(jnp.float32, (_SIDE, _SIDE), 0) * packed[-1][0]
            return lax.optimization_barrier((*moved, (grid @ grid)[0, :1]))

        return jax.jit(jax.shard_map(move_all, mesh=self._mesh, in_specs=_ALONG, out_specs=_ALONG))


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


def _form(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of what each device sends in a round: that of the pieces where they are alike, else one long dim."""
    if len(set(shapes)) == 1 and shapes[0]:
        return shapes[0]
    return (max(map(math.prod, shapes)),)


@lru_cache
def _packing(length: int) -> Callable[[Any], Any]:
    return jax.jit(lambda piece: jnp.pad(piece.reshape(-1), (0, length - piece.size)))


@lru_cache
def _unpacking(shape: tuple[int, ...]) -> Callable[[Any], Any]:
    return jax.jit(lambda packed: packed[: math.prod(shape)].reshape(shape))
