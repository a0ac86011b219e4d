"""Memory of a choice over time: which stored values are live when, and how many bytes each strategy gives them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.graph.liveness import Liveness
from meshwright.planner.folding import Folded
from meshwright.planner.groups import Grouping
from meshwright.planner.numbering import pack
from meshwright.planner.pricing import GroupTable
from meshwright.strategy.candidates import reducing_axes, tensor_holders
from meshwright.strategy.sharding import Axes, Codes

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Span = tuple[int, int, int, float]  # column, start, stop, share of the column's bytes


@dataclass(frozen=True, slots=True)
class Profile:
    """Bytes on one device at each operation of the graph."""

    bytes_at: Array

    @property
    def peak_bytes(self) -> int:
        return int(np.ceil(self.bytes_at.max(initial=0)))

    @property
    def peak_at(self) -> int:
        return int(np.argmax(self.bytes_at)) if len(self.bytes_at) else 0


class MemoryModel:
    """Everything that takes memory, as columns: one per value position of a class, with the intervals of its copies."""

    def __init__(self, grouping: Grouping, folded: Folded, live: Liveness, tables: list[GroupTable], axes: Axes):
        self.grouping, self.folded, self.live, self.tables, self.axes = grouping, folded, live, tables, axes
        self.num_steps = live.num_steps
        self.column_class: list[int] = []
        self.column_bytes: list[Array] = []  # per strategy of the class
        values, columns = self._values()
        twice = live.copied[values] >= 0
        at, size = live.copied[values[twice]], live.copy_size[values[twice]]
        spans = [
            (columns, live.start[values], live.stop[values], np.ones(len(values))),
            (columns[twice], at, at + 1, size),
            *(
                np.array(list(found), float).reshape(-1, 4).T
                for found in (self._transients(), self._gradients(), self._accumulators())
            ),
        ]
        column, start, stop, self._share = (np.concatenate(parts) for parts in zip(*spans, strict=True))
        self._column, self._start, self._stop = (part.astype(np.int64) for part in (column, start, stop))

    def _values(self) -> tuple[Ints, Ints]:
        """The values that take memory, and their columns."""
        home, place = self.grouping.placed.home, self.grouping.values.rank
        values = np.flatnonzero(self.live.stored & (self.live.stop > self.live.start) & (home >= 0))
        which = np.array(self.folded.group_class, np.int64)[home[values]]
        _, first, columns = np.unique(pack(which, place[values]), return_index=True, return_inverse=True)
        for i in first.tolist():
            codes = self.tables[which[i]].codes[place[values[i]]]
            self._add(int(which[i]), self._local(values[i], codes))
        return values, columns

    def _transients(self) -> Iterator[Span]:
        """What is made for one operation only."""
        ops = self.grouping.ops
        for which, members in enumerate(self.folded.members):
            for member, size in self.tables[which].transient:
                column = self._add(which, size)
                for time in ops.items[ops.start[members] + member].tolist():
                    yield column, time, time + 1, 1.0

    def _gradients(self) -> Iterator[Span]:
        """A gradient that is reduced waits, and what it reads is held as it needs it; any other is there at once."""
        runs, leader, slots = self.live.runs, self.grouping.placed.leader, self.grouping.slots
        held: list[tuple[int, int, int]] = []  # when a gradient runs, what it reads, the column of that
        waits = (leader >= 0) & (np.diff(self.grouping.values.start) > 0)
        waits[waits] = runs[leader[waits]] > leader[waits]
        for which, members in enumerate(self.folded.members):
            late = np.array(members)[waits[members]]
            if not len(late):
                continue
            ops, table = leader[late], self.tables[which]
            nest, made = self.grouping.nests[ops[0]], self.grouping.graph.columns.first_made[ops[0]]
            reduced = np.logical_or.reduce(reducing_axes(nest, table.assignments[0], nest.results[0]), axis=1)
            column = self._add(which, self._local(made, table.codes[0]) * ~reduced)
            yield from ((column, i, at, 1.0) for i, at in zip(ops.tolist(), runs[ops].tolist(), strict=True))
            for number in np.flatnonzero(slots.member[slots.start[late[0]] : slots.start[late[0] + 1]] == 0).tolist():
                read = slots.value[slots.start[late] + number]
                column = self._add(which, self._local(read[0], table.needs[number]) * reduced)
                held += [(at, v, column) for at, v in zip(runs[ops].tolist(), read.tolist(), strict=True)]
        until = self.live.stop.tolist()
        for time, value, column in sorted(held):
            if until[value] <= time:
                yield column, until[value], time + 1, 1.0
                until[value] = time + 1

    def _accumulators(self) -> Iterator[Span]:
        """What a loop adds up is as large as before its partial sums are settled, until the loop is over."""
        accumulated, ops = self.grouping.accumulated, self.grouping.ops
        for index, found in accumulated.items():
            group = int(self.grouping.placed.group[index])
            which = self.folded.group_class[group]
            nest, table = self.grouping.nests[index], self.tables[which]
            loops = table.assignments[ops.rank[index]]
            made = self.grouping.graph.columns.first_made[index]
            before = self.axes.pack(tensor_holders(nest.results[0], loops, len(nest.loops)))
            after = table.codes[self.grouping.place[made]]
            more = found.growth * (self._local(made, before) - self._local(made, after))
            if more.any():
                yield self._add(which, more), found.start, found.stop, 1.0

    def _local(self, value: int, codes: Codes) -> Array:
        """Bytes of a value on one device, for each of its shardings."""
        graph = self.grouping.graph
        return graph.kinds[graph.kind[value]].num_bytes / self.axes.num_parts(codes)

    def _add(self, which: int, size: Array) -> int:
        self.column_class.append(which)
        self.column_bytes.append(size)
        return len(self.column_class) - 1

    def profile(self, choice: Ints, extra: list[tuple[int, int, float]]) -> Profile:
        """Bytes over time under a choice, with ``extra`` buffers ``(start, stop, bytes)`` of resharded copies."""
        chosen = [size[choice[c]] for c, size in zip(self.column_class, self.column_bytes, strict=True)]
        change = self._change(np.array(chosen))
        for start, stop, size in extra:
            change[start] += size
            change[stop] -= size
        return Profile(np.cumsum(change)[:-1])

    def least(self) -> Profile:
        """Bytes over time if every value were split as far as any strategy splits it: no choice goes below."""
        return Profile(np.cumsum(self._change(np.array([size.min() for size in self.column_bytes])))[:-1])

    def _change(self, chosen: Array) -> Array:
        """What is taken and given back at each operation, given the bytes of each column."""
        change: Array = np.zeros(self.num_steps + 1)
        if len(chosen):
            size = self._share * chosen[self._column]
            change += np.bincount(self._start, size, len(change))
            change -= np.bincount(self._stop, size, len(change))
        return change

    def usage(self, time: int, num_classes: int) -> list[Array | None]:
        """For each class, the bytes per strategy that its values take at a time; None where it holds nothing then."""
        live = (self._start <= time) & (time < self._stop)
        counts = np.bincount(self._column[live], self._share[live], len(self.column_class))
        found: list[Array | None] = [None] * num_classes
        for column in np.flatnonzero(counts):
            which = self.column_class[column]
            size = counts[column] * self.column_bytes[column]
            previous = found[which]
            found[which] = size if previous is None else previous + size
        return found
