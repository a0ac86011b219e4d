"""The properties of a graph's forward pass that matter for cutting it into layers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright import jax_compat
from meshwright.arrays import Bools, Floats, Ints
from meshwright.graph import Graph
from meshwright.graph.phases import BACKWARD, FORWARD, PHASES
from meshwright.planner.grouping.roles import Roles
from meshwright.rules.base import LoopNest

_LARGE = 0.25  # share of the forward pass from which a loop counts as a loop over layers


@dataclass(frozen=True)
class Flow:
    """A graph with its loop nests and the roles of its arguments."""

    graph: Graph
    nests: Sequence[LoopNest]
    roles: Roles

    @cached_property
    def forward(self) -> Ints:
        """Indices of the forward operations."""
        return np.flatnonzero(self.graph.columns.phase == PHASES.index(FORWARD))

    @cached_property
    def flops(self) -> Floats:
        """Floating-point operations of each operation in one step."""
        return np.array([nest.flops for nest in self.nests]) * self.graph.columns.trips

    @cached_property
    def recomputed(self) -> Bools:
        """Whether an operation repeats forward work because of the user's own `jax.checkpoint`."""
        columns = self.graph.columns
        scopes = np.array([jax_compat.is_recomputed(scope) for scope in columns.scopes], bool)
        return scopes[columns.scope] & (columns.phase == PHASES.index(BACKWARD))

    @cached_property
    def dtype(self) -> str:
        """The type in which most of the products are done."""
        columns = self.graph.columns
        work = np.bincount(columns.signature, self.flops, len(columns.signatures))
        operands = columns.signatures[int(work.argmax())].operands
        return operands[0].dtype if operands else "float32"

    @cached_property
    def num_bytes(self) -> Floats:
        """Bytes of each value."""
        return self.graph.num_bytes.astype(float)

    @cached_property
    def from_data(self) -> Bools:
        """Whether a value depends on the batch; every stage can compute all other values itself."""
        return self.reached(self.roles.data)

    def reached(self, values: Iterable[int]) -> Bools:
        """Whether a value depends on any of some values."""
        columns = self.graph.columns
        found, reads = bytearray(columns.num_values), columns.reads.tolist()  # looked up one by one: lists are quicker
        for value in values:
            found[value] = True
        carried = {t.made: t.carry for t in self.graph.ties}
        first, count, start = columns.first_made.tolist(), columns.num_made.tolist(), columns.start.tolist()
        for i in range(len(first)):
            if any(found[value] for value in reads[start[i] : start[i + 1]]):
                for made in range(first[i], first[i] + count[i]):
                    found[made] = True
                    if made in carried:
                        found[carried[made]] = True
        return np.frombuffer(found, bool)

    @cached_property
    def loops(self) -> tuple[tuple[int, int, int], ...]:
        """Loops over layers: first operation, one past the last, number of trips.

        Such a loop holds forward work alone; a loop that also holds backward work is one over microbatches. If all
        that it slices depends on the batch, it is one over pieces of data, such as tokens whose loss is computed.
        """
        columns, total = self.graph.columns, self.flops[self.forward].sum()
        found: list[tuple[int, int, int]] = []
        for start, stop in sorted(self.graph.loops, key=lambda loop: (loop[0], -loop[1])):
            inside = slice(start, stop)
            if found and start < found[-1][1]:
                continue  # inside a loop that is already taken
            if (columns.phase[inside] != PHASES.index(FORWARD)).any() or self._slices_data(start, stop):
                continue
            around, body = self._runs(start, stop)
            trips = body // around
            if trips > 1 and self.flops[inside].sum() >= _LARGE * total > 0:
                found.append((start, stop, trips))
        return tuple(found)

    def _runs(self, start: int, stop: int) -> tuple[int, int]:
        """How often a loop runs, and how often its body does, those of the loops around it included."""
        loops = [(a, b) for a, b in self.graph.loops if a <= start and stop <= b and (a, b) != (start, stop)]
        around = max((self._runs(a, b)[1] for a, b in loops), default=1)
        inside = self.graph.columns.trips[start:stop]  # of loops inside more often, where a carry begins less often
        return around, int(min(inside[inside > around], default=around))

    @cached_property
    def in_data_loop(self) -> Bools:
        """Whether an operation is in a loop over pieces of data, which is never cut."""
        found = np.zeros(len(self.graph.columns.signature), bool)
        for start, stop in self.graph.loops:
            found[start:stop] |= self._slices_data(start, stop)
        return found

    def _slices_data(self, start: int, stop: int) -> bool:
        """Whether a loop slices arrays, and all of them depend on the batch."""
        columns = self.graph.columns
        names = [columns.signatures[n].primitive for n in columns.signature[start:stop].tolist()]
        sliced = [int(columns.reads[columns.start[start + i]]) for i, name in enumerate(names) if name == "loop_slice"]
        return bool(sliced) and bool(self.from_data[sliced].all())

    @cached_property
    def crossing_bytes(self) -> Floats:
        """Bytes of the values computed before each operation that it or a later forward operation reads."""
        columns, size = self.graph.columns, len(self.graph.columns.signature)
        forward = columns.phase[columns.reader] == PHASES.index(FORWARD)
        read, reader = columns.reads[forward], columns.reader[forward]
        last = np.full(columns.num_values, -1)
        np.maximum.at(last, read, reader)
        made = columns.producer
        kept = (made >= 0) & (last > made) & self.from_data
        change = np.zeros(size + 2)
        np.add.at(change, made[kept] + 1, self.num_bytes[kept])
        np.add.at(change, last[kept] + 1, -self.num_bytes[kept])
        return np.cumsum(change)[: size + 1]

    @cached_property
    def cuttable(self) -> Bools:
        """Whether the forward pass can be cut before an operation: not inside a loop."""
        found = np.ones(len(self.graph.columns.signature) + 1, bool)
        for start, stop in self.graph.loops:
            if (self.graph.columns.phase[start:stop] == PHASES.index(FORWARD)).all():
                found[start + 1 : stop] = False
        return found
