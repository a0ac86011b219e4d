"""Copies of values that are read in another sharding than they are made in, as part of a choice problem.

The memory of such a copy depends on the strategies at both ends of an edge, but a choice problem has memory at nodes
alone. So an edge whose copies matter is routed through a node of its own, whose strategies are the ways to hand the
value over.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.arrays import Bools, Floats, Ints
from meshwright.strategy.sharding import Axes

EdgeKey = tuple[int, int, int, int]  # as in `Folded.edges`

_READ, _CUT, _SENT = range(3)  # a value is read as it is; a part of it is sliced out; it is resharded by communication
_FREE = -1  # in place of a needed sharding: the reader has already paid for it

NO_INTS = np.zeros(0, np.int64)


class Spans(NamedTuple):
    """Copies that are made: the interval in which each takes memory, and its bytes."""

    start: Ints
    stop: Ints
    num_bytes: Floats

    @classmethod
    def joined(cls, some: Sequence["Spans"]) -> "Spans":
        """All copies of several."""
        start, stop, num_bytes = zip(*some, strict=True) if some else ((), (), ())
        return cls(
            np.concatenate([*start, NO_INTS]), np.concatenate([*stop, NO_INTS]), np.concatenate([*num_bytes, []])
        )

    def bytes_at(self, time: int) -> float:
        """Bytes of all copies that are live at a time."""
        return float(self.num_bytes[(self.start <= time) & (time < self.stop)].sum())

    def change(self, num_steps: int) -> Floats:
        """The change of live bytes at each operation, and after the last."""
        change: Floats = np.zeros(num_steps + 1)
        change += np.bincount(self.start, self.num_bytes, num_steps + 1)
        change -= np.bincount(self.stop, self.num_bytes, num_steps + 1)
        return change


class Lifetimes(NamedTuple):
    """When copies are live.

    Attributes:
        start, stop: The interval in which each is live.
        ahead: The start of that interval if the copy needs communication.
        cut: Whether readers slice the part they need out of the value themselves if no communication is needed.
    """

    start: Ints
    stop: Ints
    ahead: Ints
    cut: Bools

    def of_some(self, which: Ints) -> "Lifetimes":
        return Lifetimes(self.start[which], self.stop[which], self.ahead[which], self.cut[which])

    def spans(self, sent: Bools | bool, num_bytes: Floats | float) -> Spans:
        """The copies that take memory, given which of them need communication, and their sizes."""
        there = sent | ~self.cut
        size = np.broadcast_to(np.asarray(num_bytes, float), there.shape)
        return Spans(np.where(sent, self.ahead, self.start)[there], self.stop[there], size[there])


class Copied(NamedTuple):
    """The copies along an edge, and when they take memory.

    Attributes:
        axes: The mesh's.
        made: The value's sharding for each strategy of the source.
        needed: The sharding that each strategy of the reader needs.
        free: Where the reader has already paid for the resharding.
        resharding: Seconds by strategies of both.
        saved: Seconds that are saved besides, by strategies of both; None if nothing is saved.
        num_bytes: The value's size, not split.
        live: When each occurrence's copy is live.
    """

    axes: Axes
    made: Ints
    needed: Ints
    free: Bools
    resharding: Floats
    saved: Floats | None
    num_bytes: float
    live: Lifetimes

    def is_live(self, times: Ints) -> Bools:
        """Whether any copy may be live, at each of some times."""
        return np.any((self.live.ahead[:, None] <= times) & (times < self.live.stop[:, None]), axis=0)

    def made_by(self, source: int, reader: int) -> Spans | None:
        """The copies under one strategy of each end; None where nothing is resharded."""
        made, needed = int(self.made[source]), int(self.needed[reader])
        if self.free[reader] or made == needed:
            return None
        size = self.num_bytes / float(self.axes.num_parts(needed))
        return self.live.spans(not self.axes.only_cuts(made, needed), size)

    def bytes_at(self, time: int) -> Floats:
        """Bytes of all its copies at a time, by strategies of both ends."""
        targets, _, of_reader = self._targets()
        return (self._count([time])[self._kinds(targets), 0] * self._size(targets))[:, of_reader]

    def _targets(self) -> tuple[Ints, Ints, Ints]:
        """The distinct needed shardings, a strategy of the reader for each, and the index of each strategy's need."""
        return np.unique(np.where(self.free, _FREE, self.needed), return_index=True, return_inverse=True)

    def _size(self, targets: Ints) -> Floats:
        size: Floats = self.num_bytes / self.axes.num_parts(np.maximum(targets, 0))
        return size

    def _kinds(self, targets: Ints) -> Ints:
        """The kind of copy from each strategy of the source to each needed sharding."""
        made, of_source = np.unique(self.made, return_inverse=True)
        kinds = [
            [_READ if b in (a, _FREE) else _CUT if self.axes.only_cuts(a, b) else _SENT for b in targets.tolist()]
            for a in made.tolist()
        ]
        return np.array(kinds, np.int64).reshape(len(made), len(targets))[of_source]

    def _count(self, times: Iterable[int]) -> Floats:
        """For each kind of copy, how many copies are live at each of some times."""
        cut, sent = (self.live.spans(way, 1.0) for way in (False, True))
        return np.array([[0.0, cut.bytes_at(time), sent.bytes_at(time)] for time in times]).reshape(-1, 3).T


class Route(NamedTuple):
    """A node between the ends of an edge, whose strategies are the ways in which the value may be handed over.

    Attributes:
        source, reader: The ends.
        before: Seconds of resharding by strategies of the source and this node; inf where they do not go together.
        after: The same for this node and the reader; it costs nothing.
        usage: Bytes at each of the constrained times, for each strategy.
        saved: As in `Copied`, between the ends themselves.
    """

    source: int
    reader: int
    before: Floats
    after: Floats
    usage: Floats
    saved: Floats | None

    def strategy(self, choice: Ints) -> int:
        """The strategy that is consistent with the strategies of both ends."""
        return int(np.argmin(self.before[choice[self.source]] + self.after[:, choice[self.reader]]))


def copies_made(copied: Mapping[EdgeKey, Copied], choice: Ints) -> Spans:
    """The copies that all edges make under a choice."""
    chosen = choice.tolist()
    made = (one.made_by(chosen[key[0]], chosen[key[2]]) for key, one in copied.items())
    return Spans.joined([spans for spans in made if spans is not None])


def find_routes(
    copied: Mapping[EdgeKey, Copied], edges: Iterable[EdgeKey], times: Iterable[int]
) -> dict[EdgeKey, Route]:
    """Routes, in order, for the edges whose copies are live at any of the times."""
    times = sorted(times)
    found = {key: _route(key, copied[key], times) for key in sorted(edges)}
    return {key: route for key, route in found.items() if route.usage.any()}


def _route(key: EdgeKey, copied: Copied, times: list[int]) -> Route:
    targets, example, of_reader = copied._targets()
    count = copied._count(times)
    # Ways that take the same memory are merged.
    alike = np.unique(count, axis=0, return_inverse=True)[1].reshape(-1)
    kinds = alike[copied._kinds(targets)]
    ways = np.unique(kinds + 3 * np.arange(len(targets))[None, :])
    target, kind = np.divmod(ways, 3)
    before = np.where(kinds[:, target] == kind, copied.resharding[:, example[target]], np.inf)
    after = np.where(target[:, None] == of_reader[None, :], 0.0, np.inf)
    by_kind = np.array([count[np.argmax(alike == k)] for k in range(int(alike.max()) + 1)])
    usage = (by_kind[kind] * copied._size(targets)[target, None]).T
    return Route(key[0], key[2], before, after, usage, copied.saved)
