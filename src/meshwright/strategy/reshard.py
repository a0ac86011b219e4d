"""Resharding: the cheapest sequence of slices, all-gathers, all-to-alls and permutes between two shardings.

One hop changes the dim that one axis splits, or gathers a dim over several axes at once, which keeps the links inside
hosts and between them busy at the same time. An axis may enter a dim only as its minor-most axis and leave it only from
there, since earlier axes are major: anything else would move data that the collective's groups do not share.
"""

from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.strategy.sharding import Axes, Codes
from meshwright.units import Numeric

SLICE = "slice"


class CollectiveTimes(Protocol):
    """The properties of a mesh that resharding needs."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def collective_s(self, kind: str, axes: tuple[int, ...], num_bytes: Numeric) -> Numeric: ...


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a resharding; ``num_bytes`` follows the convention of `Mesh.collective_s`."""

    kind: str
    axes: tuple[int, ...]
    num_bytes: float
    seconds: float
    code: int  # the sharding after the hop


@dataclass(frozen=True, slots=True)
class _Moves:
    """All legal hops between the shardings that a shape can have: parallel arrays, grouped by kind and axes."""

    codes: Codes
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    fraction: NDArray[np.float64]  # the hop's bytes ÷ the whole tensor's
    groups: tuple[tuple[str, tuple[int, ...], NDArray[np.int64]], ...]
    incoming: NDArray[np.int64]  # [state, slot] → hop index, or -1


class Resharding:
    """Prices every resharding of every tensor on one mesh; tables are made once per shape and size."""

    def __init__(self, mesh: CollectiveTimes, axes: Axes):
        self._mesh = mesh
        self._axes = axes
        self._moves: dict[tuple[int, bytes], _Moves] = {}  # by rank and shardings: most shapes have the same
        self._tables: dict[tuple[tuple[int, ...], int], tuple[_Moves, NDArray, NDArray]] = {}

    def cost(self, shape: tuple[int, ...], itemsize: int, source: Codes, target: Codes) -> NDArray[np.float64]:
        """Matrix of costs from each source sharding (rows) to each target sharding (columns)."""
        moves, distance, _ = self._table(shape, itemsize)
        rows, columns = np.searchsorted(moves.codes, source), np.searchsorted(moves.codes, target)
        return distance.take(columns, axis=1).take(rows, axis=0)  # a quarter of the time of indexing by both at once

    def pairwise(self, shape: tuple[int, ...], itemsize: int, source: Codes, target: Codes) -> NDArray[np.float64]:
        """Costs from ``source[i]`` to ``target[i]``."""
        moves, distance, _ = self._table(shape, itemsize)
        return distance[np.searchsorted(moves.codes, source), np.searchsorted(moves.codes, target)]

    def path(self, shape: tuple[int, ...], itemsize: int, source: int, target: int) -> list[Hop]:
        """The hops of the cheapest resharding, first to last."""
        moves, distance, weight = self._table(shape, itemsize)
        start, state = np.searchsorted(moves.codes, [source, target])
        total = float(np.prod(shape)) * itemsize
        kinds = {i: (kind, axes) for kind, axes, members in moves.groups for i in members.tolist()}
        hops: list[Hop] = []
        while state != start:
            choices = [h for h in moves.incoming[state].tolist() if h >= 0]
            hop = min(choices, key=lambda h: (distance[start, moves.source[h]] + weight[h], moves.source[h]))
            kind, axes = kinds[hop]
            code = int(moves.codes[state])
            hops.append(Hop(kind, axes, total * float(moves.fraction[hop]), float(weight[hop]), code))
            state = moves.source[hop]
        return hops[::-1]

    def _table(self, shape: tuple[int, ...], itemsize: int) -> tuple[_Moves, NDArray, NDArray]:
        table = self._tables.get((shape, itemsize))
        if table is None:
            codes = self._axes.legal_codes(shape)
            key = len(shape), codes.tobytes()
            moves = self._moves.get(key)
            if moves is None:
                moves = self._moves[key] = _legal_moves(self._axes, len(shape), codes)
            weight = self._weights(moves, float(np.prod(shape)) * itemsize)
            table = self._tables[shape, itemsize] = (moves, _distances(moves, weight), weight)
        return table

    def _weights(self, moves: _Moves, total_bytes: float) -> NDArray[np.float64]:
        # A slice costs almost nothing, but not zero, so that the path with the fewest hops is the cheapest of equals.
        weight = np.full(len(moves.source), 1e-15)
        for kind, axes, members in moves.groups:
            if kind != SLICE:
                weight[members] += self._mesh.collective_s(kind, axes, moves.fraction[members] * total_bytes)
        return weight


def _legal_moves(axes: Axes, rank: int, codes: Codes) -> _Moves:
    place = {code: i for i, code in enumerate(codes.tolist())}
    holders, parts = axes.unpack(codes).tolist(), axes.num_parts(codes).tolist()
    step = axes.pack(np.eye(axes.num_axes, dtype=np.int64) - 1).tolist()  # from a dim to the next, for each axis
    source: list[int] = []
    target: list[int] = []
    fraction: list[float] = []
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def add(kind: str, moved: tuple[int, ...], i: int, after: int, portion: float) -> None:
        j = place.get(after)
        if j is not None:
            groups.setdefault((kind, moved), []).append(len(source))
            source.append(i)
            target.append(j)
            fraction.append(portion)

    for i, (code, row) in enumerate(zip(place, holders, strict=True)):
        for axis, size in enumerate(axes.sizes):
            if size == 1 or any(row[later] == row[axis] for later in range(axis + 1, axes.num_axes) if row[axis] >= 0):
                continue
            for dim in range(-1, rank):
                if dim == row[axis] or (dim >= 0 and dim in row[axis + 1 :]):
                    continue
                after = code + (dim - row[axis]) * step[axis]
                if row[axis] < 0:
                    add(SLICE, (axis,), i, after, 0.0)
                elif dim < 0:
                    add("all_gather", (axis,), i, after, size / parts[i])
                else:
                    add("all_to_all", (axis,), i, after, size / parts[i])
            for other in range(axes.num_axes):
                if row[axis] >= 0 and row[other] < 0 and axes.sizes[other] == size and row.count(row[axis]) == 1:
                    after = code + (row[axis] + 1) * (step[other] - step[axis])
                    pair = (min(axis, other), max(axis, other))
                    add("permute", pair, i, after, 1.0 / parts[i])
        for dim in set(row) - {-1}:
            on = tuple(axis for axis, holders in enumerate(row) if holders == dim)
            for first in range(len(on) - 1):
                gathered = on[first:]
                after = code - (dim + 1) * sum(step[axis] for axis in gathered)
                add("all_gather", gathered, i, after, prod(axes.sizes[a] for a in gathered) / parts[i])
    targets = np.array(target, dtype=np.int64)
    return _Moves(
        codes,
        np.array(source, dtype=np.int64),
        targets,
        np.array(fraction),
        tuple((kind, moved, np.array(members)) for (kind, moved), members in groups.items()),
        _incoming(targets, len(codes)),
    )


def _incoming(target: NDArray[np.int64], num_states: int) -> NDArray[np.int64]:
    slots: list[list[int]] = [[] for _ in range(num_states)]
    for hop, state in enumerate(target.tolist()):
        slots[state].append(hop)
    width = max((len(s) for s in slots), default=0)
    return np.array([s + [-1] * (width - len(s)) for s in slots], dtype=np.int64).reshape(num_states, width)


def _distances(moves: _Moves, weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """All-pairs cheapest paths by relaxing every hop at once until nothing improves."""
    num_states = len(moves.codes)
    reached = np.full((num_states, num_states), np.inf)  # [state, start], so that reads are contiguous
    np.fill_diagonal(reached, 0.0)
    padded_source, padded_weight = np.append(moves.source, 0), np.append(weight, np.inf)
    hops = [(padded_source[slot], padded_weight[slot][:, None]) for slot in moves.incoming.T]
    while True:
        best = reached.copy()
        for source, seconds in hops:
            np.minimum(best, reached[source] + seconds, out=best)
        if np.array_equal(best, reached):
            return np.ascontiguousarray(reached.T)
        reached = best
