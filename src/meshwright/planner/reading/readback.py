"""Reads a choice back: every value's sharding, every collective one by one, and the copies that resharding makes."""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Ints
from meshwright.graph.phases import PHASES
from meshwright.planner.pricing.formulation import Formulation, early_values, lifetimes
from meshwright.planner.pricing.group_table import SETTLING, GroupTable
from meshwright.plans.plan import Collective
from meshwright.plans.tensor import Spec
from meshwright.solver.problem.copies import Spans, copies_made
from meshwright.solver.problem.priced import Profile
from meshwright.strategy.reshard import SLICE, Hop
from meshwright.strategy.sharding import Codes


class Resharded(NamedTuple):
    """One value that is resharded for one reader or for several at once.

    Attributes:
        value: The value.
        source: The sharding it has.
        target: The sharding it is resharded to.
        readers: Operations that read the copy; the program's last operation if a result takes the copy on.
        trips: How often that happens in one step.
        phase: Phase of the readers.
        op: Index of the first operation that reads the copy, or of the producer of a value that an argument, carry or
            result takes on; -1 for none.
        taken: The argument or carry that takes the value on; -1 if operations read it.
        output: The output position that takes it on; -1 for none.
    """

    value: int
    source: int
    target: int
    readers: tuple[int, ...]
    trips: float
    phase: str
    op: int
    taken: int = -1
    output: int = -1


class Readback:
    """A choice on one formulation, in terms of the graph.

    Args:
        formulation: The problem.
        choice: The choice.
        unlimited: The best choice without a memory limit, if it is known.
    """

    def __init__(self, formulation: Formulation, choice: NDArray[np.int64], unlimited: NDArray[np.int64] | None = None):
        self.formulation = formulation
        self.choice, self.unlimited = choice, unlimited
        self.grouping = formulation.grouping
        self.graph = formulation.grouping.graph
        self.folded = formulation.folded
        self.axes = formulation.axes
        self._specs: dict[tuple[int, int], Spec] = {}
        self._explained: dict[tuple[int, int], GroupTable] = {}

    def code(self, value: int) -> int:
        """The sharding in which a value is computed; 0 for values that belong to no group."""
        return int(self.made[value])

    @cached_property
    def made(self) -> Codes:
        """The sharding in which each value is computed; 0 for values that belong to no group."""
        values, home = self.grouping.values, self.grouping.placed.home
        made = np.zeros(len(home), np.int64)
        made[values.items] = self._chosen("codes", home[values.items], values.rank[values.items])
        return made

    @cached_property
    def _copied(self) -> Codes:
        """The sharding of each shared reading."""
        first = self.formulation.num_groups
        chosen = [codes[s] for codes, s in zip(self.formulation.shared_codes, self.choice[first:], strict=True)]
        return np.array(chosen, np.int64)[np.array(self.folded.shared_class, np.int64) - first]

    def _chosen(self, part: str, groups: Ints, places: Ints) -> Ints:
        """Entries of a part of the groups' tables, a list of columns, at some places under the chosen strategies."""
        lists = [getattr(table, part) for table in self.formulation.tables]
        start = np.cumsum([0, *map(len, lists)])
        pairs = zip(lists, self.choice, strict=False)  # shared readings come after the groups
        flat = np.array([column[strategy] for columns, strategy in pairs for column in columns], np.int64)
        return flat[start[np.array(self.folded.group_class, np.int64)[groups]] + places]

    def spec(self, code: int, rank: int) -> Spec:
        """A code as axis names."""
        key = (code, rank)
        if key not in self._specs:
            names = self.formulation.mesh.names
            self._specs[key] = tuple(tuple(names[a] for a in axes) for axes in self.axes.dims(code, rank))
        return self._specs[key]

    @cached_property
    def joined(self) -> dict[int, int]:
        """Leading operations whose sums are settled together with others', and the additions at which they join."""
        joining, slots, group = self.grouping.joining, self.grouping.slots, self.grouping.placed.group
        found, known = {}, dict[tuple[int, int, int], bool]()
        for leader, addition in joining.joins.items():
            source, reader = (self.folded.group_class[int(group[op])] for op in (leader, addition))
            at = slice(*slots.start[[group[addition], group[addition] + 1]])
            end = self.graph.columns.first_made[joining.paths[leader][-1]]
            slot = int(np.flatnonzero((slots.op[at] == addition) & (slots.value[at] == end))[0])
            if (source, reader, slot) not in known:
                saved = self.formulation.tables[source].joined_s(self.formulation.tables[reader], slot)
                joins = saved is not None and saved[self.choice[source], self.choice[reader]] > 0
                known[source, reader, slot] = joins
            if known[source, reader, slot]:
                found[leader] = addition
        return found

    def resharded(self) -> Iterator[Resharded]:
        """Every resharding between groups."""
        yield from self._of_shared()
        yield from self._of_slots()
        yield from self._of_results()

    def _of_results(self) -> Iterator[Resharded]:
        graph = self.graph
        for output, code in self.formulation.restrictions.results.items():
            value = graph.outputs[output]
            source, made, last = self.code(value), graph.producer.get(value, -1), len(graph.ops)
            if output not in graph.state and value in self.grouping.home and source != code:
                phase = graph.ops[made].phase if made >= 0 else "forward"
                yield Resharded(value, source, code, tuple(range(last)[-1:]), 1.0, phase, made, output=output)

    def _of_shared(self) -> Iterator[Resharded]:
        slots, shared = self.grouping.slots, self.folded.shared
        source = self.made[[reading.value for reading in shared]]
        for i in np.flatnonzero(source != self._copied).tolist():
            reads = [slots.start[group] + rank for group, rank in shared[i].readers]
            at, codes = slots.op[reads].tolist(), (int(source[i]), int(self._copied[i]))
            trips = float(slots.trips[reads].max())
            yield Resharded(shared[i].value, *codes, tuple(at), trips, shared[i].phase, at[0])

    def _of_slots(self) -> Iterator[Resharded]:
        columns, slots, values = self.graph.columns, self.grouping.slots, self.grouping.values
        through, source = self.folded.through, self.made[slots.value]
        source[through >= 0] = self._copied[through[through >= 0]]
        target, paid = (self._chosen(part, slots.group, slots.rank) for part in ("needs", "duplicate"))
        moved = np.flatnonzero((source != target) & (paid == 0))
        value, read_by = slots.value[moved], slots.op[moved]
        op = np.where(read_by >= 0, read_by, columns.producer[value])
        at = np.where(op >= 0, op, len(columns.signature) - 1)
        taken = np.full(len(moved), -1)
        late = read_by < 0
        taken[late] = values.items[values.start[slots.group[moved][late]] + slots.operand[moved][late]]
        # A value without a producer has the last operation's phase; forward if there are no operations at all.
        phases = [PHASES[number] for number in np.append(columns.phase, 0)[at].tolist()]
        value, source, target, trips = (x.tolist() for x in (value, source[moved], target[moved], slots.trips[moved]))
        readers = [(index,) if index >= 0 else () for index in at.tolist()]
        return map(Resharded, value, source, target, readers, trips, phases, op.tolist(), taken.tolist())

    def _label(self, item: Resharded) -> str:
        """A readable name of the operation, argument or result that needs the copy."""
        graph, op = self.graph, item.op
        if item.output >= 0:
            return graph.output_paths[item.output]
        if item.taken >= 0:
            if item.taken in graph.inputs:
                return graph.input_paths[graph.inputs.index(item.taken)]
            op = graph.producer[item.taken]
        return graph.ops[op].label

    def hops(self, item: Resharded) -> list[Hop]:
        """The collectives of one resharding."""
        shape, itemsize = self.graph.types[item.value].shape, int(self.graph.sent_itemsize[item.value])
        path = self.formulation.pricer.resharding.path(shape, itemsize, item.source, item.target)
        return [hop for hop in path if hop.kind != SLICE]

    def profile(self) -> Profile:
        """Memory over time, resharded copies counted."""
        return self.formulation.memory.profile(self.choice, self.copies())

    def copies(self) -> Spans:
        """The copies that resharding makes."""
        made = copies_made(self.formulation.copied, self.choice)
        return Spans.joined([made, self._spans(list(self._of_results()))])

    def _spans(self, items: list[Resharded]) -> Spans:
        """When the copies of some reshardings take memory."""
        items = [item for item in items if item.readers]
        count = [len(item.readers) for item in items]
        readers = [op for item in items for op in item.readers]
        values = np.array([item.value for item in items], np.int64)
        live = lifetimes(self.formulation.live, np.array(readers, np.int64), np.cumsum([0, *count])[:-1], values)
        sent = np.array([not self.axes.only_cuts(item.source, item.target) for item in items], bool)
        size = np.array([self._size(item) for item in items], float)
        return live.spans(sent, size * self.graph.sent_itemsize[values])

    def _size(self, item: Resharded) -> float:
        """Elements of a resharded copy on each device."""
        return float(self.graph.sizes[item.value] / self.axes.num_parts(item.target))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every communication of the plan, in the order of the operations."""
        names = self.formulation.mesh.names
        found: list[tuple[int, Collective]] = []
        for group_id, group in enumerate(self.grouping.groups):
            for event in self.explained(group_id).events:
                index = group.ops[event.member]
                if index in self.joined and event.purpose in SETTLING:
                    continue
                op = self.graph.ops[index]
                axes = tuple(names[a] for a in event.axes)
                item = Collective(
                    event.kind,
                    axes,
                    event.num_bytes,
                    event.seconds,
                    op.phase,
                    op.label,
                    op.source,
                    event.purpose,
                    event.trips,
                    op.serial,
                )
                found.append((index, item))
        early = early_values(self.graph)
        for read in self.resharded():
            reader = self.graph.ops[read.op] if read.op >= 0 else None
            source, label = reader.source if reader else "", self._label(read)
            about = (read.phase, label, source, "reshard", read.trips, reader.serial if reader else -1)
            for hop in self.hops(read):
                axes = tuple(names[a] for a in hop.axes)
                seconds = read.trips * hop.seconds
                item = Collective(hop.kind, axes, hop.num_bytes, seconds, *about, read.value in early)
                found.append((min(read.readers, default=0), item))
        return tuple(item for _, item in sorted(found, key=lambda pair: pair[0]))

    def communication(self) -> float:
        """Seconds of communication of one step: the sum over `collectives`, counted by classes."""
        tables, formulation = self.formulation.tables, self.formulation
        inside = sum(
            len(members) * (formulation.costs[c][self.choice[c]] - tables[c].compute[self.choice[c]])
            for c, members in enumerate(self.folded.members)
        )
        between = sum(
            count * matrix[self.choice[key[0]], self.choice[key[2]]]
            for key, (count, matrix) in formulation.edges.items()
        )
        return float(inside + between)

    def flops(self) -> float:
        """Floating-point operations of the loop nests on one device in one step."""
        total, sizes = 0.0, np.array(self.axes.sizes)
        for which, members in enumerate(self.folded.members):
            for member, index in enumerate(self.grouping.groups[members[0]].ops):
                if nest_flops := self.grouping.nests[index].flops:
                    loops = self.formulation.tables[which].assignments[member][self.choice[which]]
                    parts = np.where(loops >= 0, sizes, 1).prod()
                    total += len(members) * self.graph.columns.trips[index] * nest_flops / float(parts)
        return float(total)

    def compute(self) -> float:
        """Seconds of compute of one step."""
        tables = self.formulation.tables
        return float(sum(tables[c].compute[self.choice[c]] * len(m) for c, m in enumerate(self.folded.members)))

    def explained(self, group_id: int) -> GroupTable:
        """The table of a group's chosen strategy alone, with its collectives and loads."""
        which = self.folded.group_class[group_id]
        key = (self.folded.alike[which], int(self.choice[which]))
        if key not in self._explained:
            group, table = self.grouping.groups[group_id], self.formulation.tables[which]
            self._explained[key] = self.formulation.pricer.explain(group, table, int(self.choice[which]))
        return self._explained[key]


class MeshProblem(Formulation):
    """A formulation that also derives the copies that a choice makes in the graph."""

    def copies_made(self, choice: NDArray[np.int64]) -> Spans:
        """The copies that resharding makes under a choice."""
        return Readback(self, choice).copies()
