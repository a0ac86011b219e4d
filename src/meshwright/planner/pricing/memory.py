"""Memory of a choice over time: which stored values are live when, and how many bytes each strategy gives them.

The model is of XLA's GPU backend. On virtual CPU devices two rules differ (`MemoryModel._waiting`, `expansions`); with
them planned memory is within 35% of what XLA's CPU backend allocates, which suffices for devices that stand in for
others.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod

import numpy as np

from meshwright.arrays import Bools, Floats, Ints
from meshwright.cost.xla_gpu.liveness import Copies, Liveness
from meshwright.hardware import Mesh
from meshwright.planner.grouping.folding import Folded
from meshwright.planner.grouping.groups import Grouping
from meshwright.planner.grouping.numbering import pack, ranges, starts
from meshwright.planner.grouping.roles import find_roles
from meshwright.planner.pricing.group_table import GroupTable
from meshwright.rules.base import Dims, LoopNest, Signature
from meshwright.solver.problem.priced import Usage
from meshwright.strategy.candidates import reducing_axes, tensor_holders
from meshwright.strategy.sharding import Axes, Codes

Span = tuple[int, int, int, int, float]  # column, group, start, stop, share of the column's bytes


class MemoryModel(Usage):
    """Everything that takes memory, as columns: one per value position of a class, with the intervals of its copies.

    Attributes:
        examples: For the first columns, which hold values, one value of each; the columns after them are temporary.
        group: For each span, the group whose strategy decides how many bytes it takes.
        raw_gradients: The temporary columns that hold gradients before they are reduced.
        waiting: For each class of gradients that may wait, and for each of its strategies, whether they do.
    """

    def __init__(
        self, grouping: Grouping, folded: Folded, live: Liveness, tables: list[GroupTable], axes: Axes, mesh: Mesh
    ):
        self.grouping, self.folded, self.live, self.tables, self.axes = grouping, folded, live, tables, axes
        self.mesh = mesh
        super().__init__(live.num_steps)
        self.raw_gradients: set[int] = set()
        self.waiting: dict[int, Bools] = {}
        self._growing: dict[tuple[int, int, float], int | None] = {}  # columns by class, operation there and factor
        held = self._held()
        held = held.only(self.grouping.placed.home[held.value] >= 0)
        columns = self._columns(held.value)
        in_passing = (self._transients(), self._accumulators(), self._joining(), self._gradients(), self._expanded())
        spans = [
            np.array([columns, self.grouping.placed.home[held.value], held.start, held.stop, held.size]),
            *(np.array(list(found), float).reshape(-1, 5).T for found in in_passing),
        ]
        column, group, *rest = (np.concatenate(parts) for parts in zip(*spans, strict=True))
        self.take(column, *rest)
        self.group = group.astype(np.int64)

    @cached_property
    def roles(self) -> list[str]:
        """The role of each column's contents: one of ``MEMORY_ROLES`` of a record."""
        named = find_roles(self.grouping.graph)
        known = dict.fromkeys(named.parameters, "parameters") | dict.fromkeys(named.optimizer, "optimizer")
        known |= dict.fromkeys(named.data, "data") | dict.fromkeys(self.grouping.gradients, "gradients")
        found = [known.get(value, "activations") for value in self.examples]
        passing = range(len(found), len(self.column_class))
        return found + ["gradients" if column in self.raw_gradients else "temporaries" for column in passing]

    def charge(self, prices: Mapping[int, float], costs: Floats, first: Ints) -> None:
        """Adds to the costs of strategies the price of the memory they take at some moments.

        Args:
            prices: Moments, each with the price of a byte there.
            costs: Costs of all strategies of all groups, with nothing tied.
            first: Where the strategies of each group begin.
        """
        rate = self.share * sum(price * ((self.start <= time) & (time < self.stop)) for time, price in prices.items())
        some = np.flatnonzero(rate)
        column, size = self.column[some], np.array([len(taken) for taken in self.column_bytes])
        taken = np.concatenate(self.column_bytes)[ranges(starts(size)[column], size[column])]
        places = ranges(first[self.group[some]], size[column])
        costs += np.bincount(places, np.repeat(rate[some], size[column]) * taken, len(costs))

    def _held(self) -> Copies:
        """All values that are stored to be read later, whether they belong to a group or not."""
        live, copies = self.live, self.live.copies.only(self.live.stored[self.live.copies.value])
        values = np.flatnonzero(live.stored & (live.stop > live.start))
        own = Copies(values, live.start[values], live.stop[values], np.ones(len(values)))
        return Copies(*(np.concatenate(pair) for pair in zip(own, copies, strict=True)))

    def _columns(self, values: Ints) -> Ints:
        """The columns of values that take memory."""
        home, place = self.grouping.placed.home, self.grouping.values.rank
        which = np.array(self.folded.group_class, np.int64)[home[values]]
        _, first, columns = np.unique(pack(which, place[values]), return_index=True, return_inverse=True)
        for i in first.tolist():
            codes = self.tables[which[i]].codes[place[values[i]]]
            self.add(int(which[i]), self._local(values[i], codes))
        self.examples = values[first].tolist()
        return columns

    def _transients(self) -> Iterator[Span]:
        """Operands that are computed for one operation only."""
        for which in range(len(self.folded.members)):
            for member, size in self.tables[which].transient:
                yield from self._while_running(which, member, size)

    def _accumulators(self) -> Iterator[Span]:
        """Sums that a loop adds up: they keep their size before settling until the loop ends."""
        for index, found in self.grouping.accumulated.items():
            yield from self._unsettled(index, found.growth, found.start, found.stop)

    def _unsettled(self, index: int, growth: float, start: int, stop: int) -> Iterator[Span]:
        """The additional memory of an operation's result until its partial sums are settled."""
        group = int(self.grouping.placed.group[index])
        which, rank = self.folded.group_class[group], int(self.grouping.ops.rank[index])
        key = which, rank, growth
        if key not in self._growing:
            more = growth * self._growth(index, self.tables[which], rank)
            made = int(self.grouping.graph.columns.first_made[index])
            self._growing[key] = self._add_partial(which, more, made) if more.any() else None
        column = self._growing[key]
        if column is not None:
            yield column, group, start, stop, 1.0

    def _add_partial(self, which: int, size: Floats, made: int) -> int:
        """Adds a column for the bytes that a value takes before it is reduced."""
        column = self.add(which, size)
        if made in self.grouping.gradients:
            self.raw_gradients.add(column)
        return column

    def _growth(self, index: int, table: GroupTable, rank: int) -> Floats:
        """By how much an operation's result is larger before its partial sums are settled, for each strategy."""
        nest = self.grouping.nests[index]
        made = self.grouping.graph.columns.first_made[index]
        before = self.axes.pack(tensor_holders(nest.results[0], table.assignments[rank], len(nest.loops)))
        return self._local(made, before) - self._local(made, table.codes[self.grouping.place[made]])

    def _local(self, value: int, codes: Codes) -> Floats:
        """Bytes of a value on one device, for each of its shardings."""
        graph = self.grouping.graph
        return graph.kinds[graph.kind[value]].num_bytes / self.axes.num_parts(codes)

    def _joining(self) -> Iterator[Span]:
        """Sums that may join one another: they keep their size before settling until they are added up."""
        for op, addition in self.grouping.joining.until.items():
            yield from self._unsettled(op, 1.0, op, addition + 1)

    def _gradients(self) -> Iterator[Span]:
        """Operands of gradients that wait, in the shardings they are read in; results of gradients that do not wait."""
        runs, leader, slots = self.live.runs, self.grouping.placed.leader, self.grouping.slots
        held: list[tuple[int, int, int, int]] = []  # when a gradient runs, its operand, the operand's column and group
        waits = (leader >= 0) & (np.diff(self.grouping.values.start) > 0)
        waits[waits] = runs[leader[waits]] > leader[waits]
        for which, members in enumerate(self.folded.members):
            late = np.array(members)[waits[members]]
            if not len(late):
                continue
            ops, table = leader[late], self.tables[which]
            nest, made = self.grouping.nests[ops[0]], self.grouping.graph.columns.first_made[ops[0]]
            waiting = self.waiting[which] = self._waiting(nest, table)
            column = self._add_partial(which, self._local(made, table.codes[0]) * ~waiting, int(made))
            at = runs[ops].tolist()
            yield from ((column, *span, 1.0) for span in zip(late.tolist(), ops.tolist(), at, strict=True))
            for number in np.flatnonzero(slots.member[slots.start[late[0]] : slots.start[late[0] + 1]] == 0).tolist():
                read = slots.value[slots.start[late] + number]
                column = self.add(which, self._local(read[0], table.needs[number]) * waiting)
                held += [(i, v, column, group) for i, v, group in zip(at, read.tolist(), late.tolist(), strict=True)]
        until = self.live.stop.tolist()
        for time, value, column, group in sorted(held):
            if until[value] <= time:
                yield column, group, until[value], time + 1, 1.0
                until[value] = time + 1

    def _waiting(self, nest: LoopNest, table: GroupTable) -> Bools:
        """For each strategy, whether a gradient waits, which it does if it is reduced over devices.

        XLA's CPU backend orders operations depth first from the results: there all gradients of weights are computed
        last.
        """
        if self.mesh.is_cpu:
            return np.ones(len(table.compute), bool)
        found: Bools = np.any(reducing_axes(nest, table.assignments[0], nest.results[0]), axis=1)
        return found

    def _expanded(self) -> Iterator[Span]:
        """The memory that operations without a kernel take on CPUs while they run."""
        if not self.mesh.is_cpu:
            return
        columns, ops = self.grouping.graph.columns, self.grouping.ops
        is_expanded = np.array([op.primitive in _EXPANDED for op in columns.signatures], bool)[columns.signature]
        for which, members in enumerate(self.folded.members):
            indices = ops.items[slice(*ops.start[[members[0], members[0] + 1]])]
            for member in np.flatnonzero(is_expanded[indices]).tolist():
                nest, loops = self.grouping.nests[indices[member]], self.tables[which].assignments[member]
                for num_bytes, dims in expansions(columns.signatures[columns.signature[indices[member]]], nest):
                    held = self.axes.pack(tensor_holders(dims, loops, len(nest.loops)))
                    yield from self._while_running(which, member, num_bytes / self.axes.num_parts(held))

    def _while_running(self, which: int, member: int, size: Floats) -> Iterator[Span]:
        """The memory that an operation of each group of a class takes while it runs."""
        column, ops, members = self.add(which, size), self.grouping.ops, self.folded.members[which]
        times = ops.items[ops.start[members] + member].tolist()
        yield from ((column, group, at, at + 1, 1.0) for group, at in zip(members, times, strict=True))


_EXPANDED = frozenset({"select_and_scatter", "select_and_scatter_add", "ragged_dot_general"})


def expansions(op: Signature, nest: LoopNest) -> list[tuple[int, Dims]]:
    """The arrays that XLA's CPU backend writes for an operation without a kernel: bytes, and the loops of each dim.

    The gradient of max pooling finds the largest element of each window by its position, an index along each dim. A
    product of groups of rows (`jax.lax.ragged_dot`) becomes a product of all rows for every group.
    """
    if op.primitive != "ragged_dot_general":
        whole = op.results[0].shape
        return [(len(whole) * np.dtype(np.int32).itemsize * prod(whole), nest.results[0])]
    numbers = op.params["ragged_dot_dimension_numbers"]
    ((contracted, _), (batch, _)), rows = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions[0]
    if rows in batch:
        return []
    sums_rows = rows in contracted
    groups = nest.results[0][0] if sums_rows else nest.operands[1][numbers.rhs_group_dimensions[0]]
    count = prod(nest.loops[loop].size for loop in groups)
    factors = zip(op.operands[: 1 + sums_rows], nest.operands, strict=False)
    return [(count * kind.num_bytes, (groups, *dims)) for kind, dims in factors]
