"""Sums that a loop adds up from trip to trip: if they are partial on each device, they need be reduced only once.

A carry that a loop's body only adds to is such a sum: the gradients of microbatches, or of weights that all trips use.
The terms may be transposed or converted without loss on the way (see `hands_sums_on`), stacked by an inner loop, or
themselves be the sum of an inner loop.
"""

from typing import NamedTuple

import numpy as np

from meshwright.graph.dtypes import hands_sums_on
from meshwright.graph.graph import Graph, Tie

ADDING = ("add", "add_any")
_PASSING = ("transpose", "loop_stack")
_CONTRIBUTING = ("dot_general", "conv_general_dilated", "reduce_sum", "scatter-add")


def contributes(primitive: str) -> bool:
    """Whether the runtime can keep contributions to an operation's sums apart, one for each device."""
    return primitive in _CONTRIBUTING


class Accumulated(NamedTuple):
    """An operation whose results loops add up.

    Attributes:
        chain: The operations that pass them on, innermost first: transposing, stacking, adding, the loops' carries.
        trips: How often the outermost of the loops is run.
        growth: Size in bytes of that loop's carry, relative to one result.
        start, stop: The operations of that loop.
    """

    chain: tuple[int, ...]
    trips: float
    growth: float
    start: int
    stop: int


def find_accumulated(graph: Graph) -> dict[int, Accumulated]:
    """All operations whose results are added up, by index."""
    if not graph.ties:
        return {}
    return _Finder(graph).run()


class _Finder:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.columns = graph.columns
        self.producer = graph.columns.producer
        self.made_by_trip = {t.carry: t for t in graph.ties}
        self.num_reads = np.bincount(self.columns.reads, minlength=self.columns.num_values)
        self.num_reads[[*graph.outputs, *(t.made for t in graph.ties)]] += 1
        order = np.argsort(self.columns.reads, kind="stable")
        self.readers, self.first = (
            self.columns.reader[order],
            np.searchsorted(self.columns.reads[order], np.arange(self.columns.num_values + 1)),
        )

    def run(self) -> dict[int, Accumulated]:
        found: dict[int, Accumulated] = {}
        for tie in self.graph.ties:
            self._follow(tie, [], None, found)
        return found

    def _follow(self, tie: Tie, chain: list[int], outer: Tie | None, found: dict[int, Accumulated]) -> None:
        """Follows a carry inwards to the operations that contribute to it, and keeps the longest path from each."""
        added = self._added(tie)
        if added is None:
            return
        outermost = outer or tie
        chain = [*chain, int(self.producer[tie.carry]), int(self.producer[tie.made])]
        value = added
        while self.num_reads[value] == 1 and self.producer[value] >= 0:
            index = int(self.producer[value])
            name = self.columns.primitive(index)
            if contributes(name):
                known = found.get(index)
                if known is None or len(known.chain) < len(chain):
                    found[index] = self._accumulated(index, value, chain, outermost)
                return
            if name == "loop_carry":
                inner = self.made_by_trip.get(value)
                if inner is not None:
                    self._follow(inner, chain, outermost, found)
                return
            if name not in _PASSING and not hands_sums_on(self.columns.signatures[self.columns.signature[index]]):
                return
            chain.append(index)
            value = int(self.columns.reads_of(index)[0])

    def _accumulated(self, index: int, value: int, chain: list[int], outermost: Tie) -> Accumulated:
        types, carry = self.graph.types, int(self.producer[outermost.carry])
        start, stop = self._loop(carry, int(self.producer[outermost.made]))
        growth = types[outermost.carry].num_bytes / max(types[value].num_bytes, 1)
        return Accumulated(tuple(reversed(chain)), float(self.columns.trips[carry]), growth, start, stop)

    def _added(self, tie: Tie) -> int | None:
        """The value that each trip adds to a carry that it does not use otherwise; None if there is none."""
        index, carry = int(self.producer[tie.made]), int(self.producer[tie.carry])
        if (
            index < 0
            or carry < 0
            or self.columns.primitive(index) not in ADDING
            or not self.graph.types[tie.carry].shape
        ):
            return None
        reads = self.columns.reads_of(index).tolist()
        if reads.count(tie.carry) != 1 or self.num_reads[tie.made] != 1:
            return None
        start, stop = self._loop(carry, index)
        readers = self.readers[self.first[tie.carry] : self.first[tie.carry + 1]]
        if np.count_nonzero((readers >= start) & (readers < stop)) != 1:
            return None
        other = next(v for v in reads if v != tie.carry)
        return other if self.graph.types[other] == self.graph.types[tie.carry] else None

    def _loop(self, carry: int, made: int) -> tuple[int, int]:
        """The operations of the loop whose carry and addition these are."""
        around = [(a, b) for a, b in self.graph.loops if a <= carry < b and a <= made < b]
        return min(around, key=lambda span: span[1] - span[0])
