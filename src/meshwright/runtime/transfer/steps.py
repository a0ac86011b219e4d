"""One process's part in moving an array along a route: it cuts shards, exchanges and shares pieces, and joins them.

The programs that cut a shard into pieces, and put pieces together to a shard, are of one device: they contain no
collective, so that any number of them may be in flight (see `cpu_turns.py`), and calling one takes about as long as
starting it on one device. XLA compiles for each device anew, so all programs of a transfer are compiled side by side,
in threads.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding

from meshwright import jax_devices
from meshwright.runtime.transfer.routes import Box, Move, Route, relative, shape_of
from meshwright.runtime.transfer.transports import Connect, SameProcess, Transport

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


class Steps:
    """This process's steps of a route, as positions in one list of pieces that grows while they run.

    Args:
        route: The route.
        source: The box that each device holds, in the order of the source sharding's devices.
        target: The box that each device needs, likewise.
        dtype: The dtype of the array.
        connect: Makes transports between processes.
    """

    def __init__(
        self, route: Route, source: Mapping[Any, Box], target: Mapping[Any, Box], dtype: Any, connect: Connect
    ):
        self._dtype = dtype
        self._compiling: list[Any] = []
        self._places: dict[tuple[Any, Box], int] = {}  # positions of pieces on devices
        self._owned: set[int] = set()  # positions of pieces that are shards of the array itself
        fetched, joined = defaultdict(list), defaultdict(list)
        for move in route.fetches:
            fetched[move.source].append(move.box)
        for move in (*route.fetches, *route.shares):
            joined[move.target].append(move.box)
        self._cuts = [
            (position, self._cut(device, source[device], fetched[device]))
            for position, device in enumerate(filter(_is_here, source))
            if device in fetched
        ]
        self._fetches = self._exchange(route.fetches, connect)
        self._shares = self._exchange(route.shares, connect)
        self._joins = [self._join(device, target[device], joined[device]) for device in filter(_is_here, target)]

    def start(self, array: Any) -> Callable[[], list[Any]]:
        """Begins to move an array.

        Returns:
            A function that waits for pieces from other processes, and returns the shards of the result on this
            process's devices, in the sharding's order.
        """
        while self._compiling:
            self._compiling.pop().result()
        pieces: list[Any] = []
        # `addressable_data` would return the first shard for each position where the shards are replicas.
        shards = array.addressable_shards if self._cuts else ()
        for position, cut in self._cuts:
            shard = shards[position].data
            pieces.extend((shard,) if cut is None else cut(shard))
        wait = self._fetches.start(pieces)

        def finish() -> list[Any]:
            if wait is not None:
                wait()
            self._shares.start(pieces)
            return [
                pieces[places[0]] if join is None else join(*(pieces[place] for place in places))
                for places, join in self._joins
            ]

        if wait is not None:
            return finish
        shards = finish()
        return lambda: shards

    def _cut(self, device: Any, whole: Box, boxes: Sequence[Box]) -> Program | None:
        """The program that cuts a shard into the pieces that are sent or kept; None where that is all of it."""
        distinct = tuple(dict.fromkeys(boxes))
        self._add((device, box) for box in distinct)
        if distinct == (whole,):
            self._owned.add(self._places[device, whole])
            return None
        program = cutting(tuple(relative(box, whole) for box in distinct))
        self._compiling.append(compiling(program, (shape_of(whole),), self._dtype, device))
        return program

    def _exchange(self, moves: Sequence[Move], connect: Connect) -> "_Exchange":
        moves = [move for move in moves if move.source != move.target]
        local = [move for move in moves if _is_here(move.source) and _is_here(move.target)]
        across: list[Move] = [move for move in moves if _process(move.source) != _process(move.target)]
        copied = [self._places[move.source, move.box] for move in local]
        outgoing = [move for move in across if _is_here(move.source)]
        sent = [self._places[move.source, move.box] for move in outgoing]
        received = [move for move in across if _is_here(move.target)]
        self._add((move.target, move.box) for move in (*local, *received))
        transport = connect(across) if sent or received else None
        if transport is None or transport.by_xla:
            owned = []
        else:
            is_owned = [place in self._owned for place in sent]
            owned = [(i, SingleDeviceSharding(outgoing[i].source)) for i, owns in enumerate(is_owned) if owns]
        return _Exchange(copied, SameProcess(local), sent, owned, transport)

    def _join(self, device: Any, whole: Box, boxes: Sequence[Box]) -> tuple[list[int], Program | None]:
        """The positions of a shard's pieces, and the program that joins them; None where there is only one."""
        places = [self._places[device, box] for box in boxes]
        if len(boxes) == 1:
            return places, None
        program = joining(tuple(relative(box, whole) for box in boxes))
        self._compiling.append(compiling(program, tuple(map(shape_of, boxes)), self._dtype, device))
        return places, program

    def _add(self, pieces: Iterable[tuple[Any, Box]]) -> None:
        for piece in pieces:
            self._places[piece] = len(self._places)


class _Exchange:
    """Moves pieces of a list: some to devices of this process, some to and from others; what arrives is appended.

    Args:
        copied: The positions of pieces for this process's devices.
        local: Copies them.
        sent: The positions of pieces for other processes.
        owned: Which of those are shards of the caller's array, and where; they are copied, since the caller may donate
            or delete the array before another process has pulled them. None where XLA orders that.
        across: Sends them, and receives others.
    """

    def __init__(
        self,
        copied: list[int],
        local: SameProcess,
        sent: list[int],
        owned: list[tuple[int, Any]],
        across: Transport | None,
    ):
        self._copied, self._local, self._sent, self._owned, self._across = copied, local, sent, owned, across

    def start(self, pieces: list[Any]) -> Callable[[], None] | None:
        """Begins the moves; returns a function that waits for what comes from other processes, if that is needed."""
        across = self._across
        received = [] if across is None else across.exchange(self._outgoing(pieces))
        if self._copied:
            pieces.extend(self._local.exchange([pieces[place] for place in self._copied]))
        pieces.extend(received)
        return None if across is None or across.by_xla or not received else lambda: across.wait(received)

    def _outgoing(self, pieces: Sequence[Any]) -> list[Any]:
        sent = [pieces[place] for place in self._sent]
        if self._owned:
            shards = [sent[i] for i, _ in self._owned]
            copies = jax_devices.copy_shards(shards, [sharding for _, sharding in self._owned], may_alias=False)
            for (i, _), copy in zip(self._owned, copies, strict=True):
                sent[i] = copy
        return sent


def _process(device: Any) -> int:
    return int(device.process_index)


def _is_here(device: Any) -> bool:
    return _process(device) == jax.process_index()
