"""Reads a choice back: every value's sharding, every collective one by one, and the copies that resharding makes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.formulate import Formulation
from meshwright.planner.memory import Profile
from meshwright.planner.plan import Collective, OpPlan, Spec
from meshwright.planner.pricing import GroupTable
from meshwright.strategy.candidates import result_holders, tensor_holders
from meshwright.strategy.reshard import SLICE, Hop

Specs = tuple[Spec | None, ...]


@dataclass(frozen=True, slots=True)
class Resharded:
    """One value that is resharded for one reader or for several at once."""

    value: int
    source: int
    target: int
    start: int  # operation indices between which the copy is live
    stop: int
    trips: float
    phase: str
    operation: str
    reader: int | None


class Readback:
    """A choice on one formulation, in terms of the graph."""

    def __init__(self, formulation: Formulation, choice: NDArray[np.int64]):
        self.formulation = formulation
        self.choice = choice
        self.grouping = formulation.grouping
        self.graph = formulation.grouping.graph
        self.folded = formulation.folded
        self.axes = formulation.axes
        self._specs: dict[tuple[int, int], Spec] = {}
        self._explained: dict[tuple[int, int], GroupTable] = {}

    def code(self, value: int) -> int:
        """The sharding in which a value is made; 0 for values that belong to no group."""
        home = self.grouping.home.get(value)
        if home is None:
            return 0
        which = self.folded.group_class[home]
        return int(self.formulation.tables[which].codes[self.grouping.place[value]][self.choice[which]])

    def spec(self, code: int, rank: int) -> Spec:
        """A code as axis names."""
        key = (code, rank)
        if key not in self._specs:
            names = self.formulation.mesh.names
            self._specs[key] = tuple(tuple(names[a] for a in axes) for axes in self.axes.dims(code, rank))
        return self._specs[key]

    def resharded(self) -> Iterator[Resharded]:
        """Every resharding between groups."""
        graph, groups = self.graph, self.grouping.groups
        num_groups = self.formulation.num_groups
        through: dict[tuple[int, int], int] = {}
        for i, reading in enumerate(self.folded.shared):
            which = self.folded.shared_class[i]
            code = int(self.formulation.shared_codes[which - num_groups][self.choice[which]])
            through |= dict.fromkeys(reading.readers, code)
            reads = [groups[g].slots[s] for g, s in reading.readers]
            at = [groups[g].ops[r.member] for (g, _), r in zip(reading.readers, reads, strict=True)]
            source = self.code(reading.value)
            if source != code:
                trips = max(r.trips for r in reads)
                label = graph.ops[at[0]].label
                yield Resharded(reading.value, source, code, min(at), max(at) + 1, trips, reading.phase, label, at[0])
        for group_id, group in enumerate(groups):
            which = self.folded.group_class[group_id]
            table, strategy = self.formulation.tables[which], self.choice[which]
            for slot, read in enumerate(group.slots):
                source = through.get((group_id, slot), -1)
                source = self.code(read.value) if source < 0 else source
                target = int(table.needs[slot][strategy])
                if source == target or table.duplicate[slot][strategy]:
                    continue
                if read.member >= 0:
                    index = group.ops[read.member]
                    op = graph.ops[index]
                    yield Resharded(read.value, source, target, index, index + 1, read.trips, op.phase, op.label, index)
                else:
                    made = graph.producer.get(read.value)
                    index = len(graph.ops) - 1 if made is None else made
                    phase = graph.ops[index].phase
                    label = self._taken_label(group.values[read.operand])
                    yield Resharded(read.value, source, target, index, index + 1, read.trips, phase, label, made)
        for output, code in self.formulation.restrictions.results.items():
            value = graph.outputs[output]
            source = self.code(value)
            if output not in graph.state and value in self.grouping.home and source != code:
                made = graph.producer.get(value)
                last = len(graph.ops)
                phase = graph.ops[made].phase if made is not None else "forward"
                yield Resharded(value, source, code, last - 1, last, 1.0, phase, graph.output_paths[output], made)

    def _taken_label(self, value: int) -> str:
        if value in self.graph.inputs:
            return self.graph.input_paths[self.graph.inputs.index(value)]
        return self.graph.ops[self.graph.producer[value]].label

    def hops(self, item: Resharded) -> list[Hop]:
        """The collectives of one resharding."""
        kind = self.graph.types[item.value]
        path = self.formulation.pricer.resharding.path(kind.shape, kind.itemsize, item.source, item.target)
        return [hop for hop in path if hop.kind != SLICE]

    def profile(self) -> Profile:
        """Memory over time, resharded copies counted."""
        return self.formulation.memory.profile(self.choice, self.copies())

    def copies(self) -> list[tuple[int, int, float]]:
        """Intervals and bytes of the copies that resharding makes."""
        types, parts = self.graph.types, self.axes.num_parts
        return [
            (item.start, item.stop, types[item.value].num_bytes / float(parts(item.target)))
            for item in self.resharded()
        ]

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every communication of the plan, in the order of the operations."""
        names = self.formulation.mesh.names
        found: list[tuple[int, Collective]] = []
        for group_id, group in enumerate(self.grouping.groups):
            for event in self._explain(group_id).events:
                index = group.ops[event.member]
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
                    op.trips,
                )
                found.append((index, item))
        for read in self.resharded():
            source = self.graph.ops[read.reader].source if read.reader is not None else ""
            for hop in self.hops(read):
                axes = tuple(names[a] for a in hop.axes)
                seconds = read.trips * hop.seconds
                item = Collective(
                    hop.kind, axes, hop.num_bytes, seconds, read.phase, read.operation, source, "reshard", read.trips
                )
                found.append((read.start, item))
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

    def compute(self) -> float:
        """Seconds of compute of one step."""
        tables = self.formulation.tables
        return float(sum(tables[c].compute[self.choice[c]] * len(m) for c, m in enumerate(self.folded.members)))

    @cached_property
    def ops(self) -> tuple[OpPlan, ...]:
        """How every operation that belongs to a group is split, in program order."""
        cache: dict[tuple[int, int, int], tuple[Specs, Specs, Specs]] = {}
        found: list[tuple[int, OpPlan]] = []
        shared = self._shared_copies()
        for group_id, group in enumerate(self.grouping.groups):
            which = self.folded.group_class[group_id]
            for member, index in enumerate(group.ops):
                key = (self.folded.alike[which], int(self.choice[which]), member)
                if key not in cache:
                    cache[key] = self._shardings(which, member, index)
                op = self.graph.ops[index]
                via = tuple(shared.get((index, operand)) for operand in range(len(op.inputs)))
                found.append((index, OpPlan(op.serial, op.label, op.phase, *cache[key], via)))
        return tuple(plan for _, plan in sorted(found, key=lambda pair: pair[0]))

    def _shared_copies(self) -> dict[tuple[int, int], Spec]:
        """For each operation and operand that reads a shared copy, the copy's sharding."""
        groups, found = self.grouping.groups, {}
        for reading, which in zip(self.folded.shared, self.folded.shared_class, strict=True):
            codes = self.formulation.shared_codes[which - self.formulation.num_groups]
            copy = self.spec(int(codes[self.choice[which]]), len(self.graph.types[reading.value].shape))
            for group_id, slot in reading.readers:
                read = groups[group_id].slots[slot]
                index = groups[group_id].ops[read.member]
                if self.graph.ops[index].inputs[read.operand] == reading.value:
                    found[index, read.operand] = copy
        return found

    def _shardings(self, which: int, member: int, index: int) -> tuple[Specs, Specs, Specs]:
        table, strategy = self.formulation.tables[which], self.choice[which]
        nest, op = self.grouping.nests[index], self.graph.ops[index]
        loops = table.assignments[member][[strategy]]
        scatter = np.full_like(loops, -1)
        if self.grouping.groups[self.folded.members[which][0]].follows[member] < 0 and table.candidates is not None:
            scatter = table.candidates.scatter[[strategy]]

        def spec(holders: NDArray[np.int64], rank: int) -> Spec | None:
            return self.spec(int(self.axes.pack(holders)[0]), rank) if rank else None

        count = len(nest.loops)
        operands = tuple(spec(tensor_holders(d, loops, count), len(d)) for d in nest.operands)
        partial = tuple(spec(tensor_holders(d, loops, count), len(d)) for d in nest.results)
        results = tuple(
            spec(result_holders(nest, loops, scatter, i), len(nest.results[i])) for i in range(len(op.outputs))
        )
        return operands, partial, results

    def _explain(self, group_id: int) -> GroupTable:
        which = self.folded.group_class[group_id]
        key = (self.folded.alike[which], int(self.choice[which]))
        if key not in self._explained:
            group, table = self.grouping.groups[group_id], self.formulation.tables[which]
            self._explained[key] = self.formulation.pricer.explain(group, table, int(self.choice[which]))
        return self._explained[key]
