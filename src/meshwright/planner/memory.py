"""Memory of a choice over time: which stored values are live when, and how many bytes each strategy gives them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.graph.liveness import Liveness
from meshwright.planner.folding import Folded
from meshwright.planner.groups import Grouping
from meshwright.planner.pricing import GroupTable
from meshwright.strategy.sharding import Axes

Array = NDArray[np.float64]


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
        graph = grouping.graph
        self.num_steps = live.num_steps
        self.column_class: list[int] = []
        self.column_bytes: list[Array] = []  # per strategy of the class
        column, start, stop = [], [], []
        for which, members in enumerate(folded.members):
            table = tables[which]
            for place, codes in enumerate(table.codes):
                values = [grouping.groups[g].values[place] for g in members]
                kept = [v for v in values if live.stored[v] and live.stop[v] > live.start[v]]
                if kept:
                    size = graph.types[kept[0]].num_bytes / axes.num_parts(codes)
                    column += [self._add(which, size)] * len(kept)
                    start += live.start[kept].tolist()
                    stop += live.stop[kept].tolist()
            for member, size in table.transient:
                times = [grouping.groups[g].ops[member] for g in members]
                column += [self._add(which, size)] * len(times)
                start += times
                stop += [t + 1 for t in times]
        self._column, self._start, self._stop = (np.array(x, dtype=np.int64) for x in (column, start, stop))

    def _add(self, which: int, size: Array) -> int:
        self.column_class.append(which)
        self.column_bytes.append(size)
        return len(self.column_class) - 1

    def profile(self, choice: NDArray[np.int64], extra: list[tuple[int, int, float]]) -> Profile:
        """Bytes over time under a choice, with ``extra`` buffers ``(start, stop, bytes)`` of resharded copies."""
        chosen = np.array([size[choice[c]] for c, size in zip(self.column_class, self.column_bytes, strict=True)])
        change = np.zeros(self.num_steps + 1)
        if len(chosen):
            np.add.at(change, self._start, chosen[self._column])
            np.add.at(change, self._stop, -chosen[self._column])
        for start, stop, size in extra:
            change[start] += size
            change[stop] -= size
        return Profile(np.cumsum(change)[:-1])

    def least(self) -> Profile:
        """Bytes over time if every value were split as far as any strategy splits it: no choice goes below."""
        change = np.zeros(self.num_steps + 1)
        smallest = np.array([size.min() for size in self.column_bytes])
        if len(smallest):
            np.add.at(change, self._start, smallest[self._column])
            np.add.at(change, self._stop, -smallest[self._column])
        return Profile(np.cumsum(change)[:-1])

    def usage(self, time: int, num_classes: int) -> list[Array | None]:
        """For each class, the bytes per strategy that its values take at a time; None where it holds nothing then."""
        live = (self._start <= time) & (time < self._stop)
        counts = np.bincount(self._column[live], minlength=len(self.column_class))
        found: list[Array | None] = [None] * num_classes
        for column in np.flatnonzero(counts):
            which = self.column_class[column]
            size = counts[column] * self.column_bytes[column]
            previous = found[which]
            found[which] = size if previous is None else previous + size
        return found
