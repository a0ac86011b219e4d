"""One process's part in moving an array along a route: it cuts shards, exchanges and shares pieces, and joins them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from meshwright.runtime.transfer.pieces import cutting, joining
from meshwright.runtime.transfer.routes import Box, Move, Route, relative
from meshwright.runtime.transfer.transports import Piece, SameProcess


class Steps:
    """This process's steps of a route, as positions in one list of pieces that grows while they run.

    Args:
        route: The route.
        source: The box that each device holds, in the order of the source sharding's devices.
        target: The box that each device needs, likewise.
    """

    def __init__(self, route: Route, source: Mapping[Any, Box], target: Mapping[Any, Box]):
        self._places: dict[tuple[Any, Box], int] = {}  # positions of pieces on devices
        fetched, joined = defaultdict(list), defaultdict(list)
        for move in route.fetches:
            fetched[move.source].append(move.box)
        for move in (*route.fetches, *route.shares):
            joined[move.target].append(move.box)
        self._cuts = [
            (position, self._cut(device, source[device], fetched[device]))
            for position, device in enumerate(_here(source))
            if device in fetched
        ]
        self._phases = [self._phase(moves) for moves in (route.fetches, route.shares)]
        self._joins = [self._join(device, target[device], joined[device]) for device in _here(target)]

    def run(self, array: Any) -> list[Any]:
        """Moves an array; returns the shards of the result on this process's devices, in the sharding's order."""
        shards = array.addressable_shards  # `addressable_data` returns the first for all where they are replicas
        pieces: list[Any] = []
        for position, cut in self._cuts:
            shard = shards[position].data
            pieces.extend((shard,) if cut is None else cut(shard))
        for sent, copies in self._phases:
            if sent:
                pieces.extend(copies.exchange([pieces[place] for place in sent]))
        return [
            pieces[places[0]] if join is None else join(*(pieces[place] for place in places))
            for places, join in self._joins
        ]

    def _cut(self, device: Any, whole: Box, boxes: Sequence[Box]) -> Callable[[Any], tuple[Any, ...]] | None:
        """The program that cuts a shard into the pieces that are sent or kept; None where that is all of it."""
        distinct = tuple(dict.fromkeys(boxes))
        self._add((device, box) for box in distinct)
        return None if distinct == (whole,) else cutting(tuple(relative(box, whole) for box in distinct))

    def _phase(self, moves: Sequence[Move]) -> tuple[list[int], SameProcess]:
        """The positions of the pieces that are sent, and how they are."""
        copied = [move for move in moves if move.source != move.target]
        sent = [self._places[move.source, move.box] for move in copied]
        self._add((move.target, move.box) for move in copied)
        return sent, SameProcess([_piece(move) for move in copied])

    def _join(self, device: Any, whole: Box, boxes: Sequence[Box]) -> tuple[list[int], Callable[..., Any] | None]:
        """The positions of a shard's pieces, and the program that joins them; None where there is only one."""
        places = [self._places[device, box] for box in boxes]
        return places, None if len(boxes) == 1 else joining(tuple(relative(box, whole) for box in boxes))

    def _add(self, pieces: Iterable[tuple[Any, Box]]) -> None:
        for piece in pieces:
            self._places[piece] = len(self._places)


def _piece(move: Move) -> Piece:
    return Piece(tuple(stop - start for start, stop in move.box), move.source, move.target)


def _here(devices: Iterable[Any]) -> list[Any]:
    process = jax.process_index()
    return [device for device in devices if device.process_index == process]
