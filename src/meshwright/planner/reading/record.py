"""Makes the record of a new plan from its graph and the problem that was solved."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Ints
from meshwright.graph import Op
from meshwright.graph.phases import PHASES
from meshwright.planner.grouping.folding import laps
from meshwright.planner.pricing.formulation import Formulation
from meshwright.planner.reading.readback import Readback
from meshwright.plans.records.record import MEMORY_ROLES, Edge, Node, Problem, Record
from meshwright.plans.records.traced_program import VIRTUAL, Nest, RecordedProgram
from meshwright.rules import LoopNest

_NUMBER = re.compile(r"\d+")


def make_record(back: Readback, limit: float | None, free: Formulation | None = None) -> Record:
    """The record of a choice.

    Args:
        back: The choice.
        limit: Bytes that were allowed on each device.
        free: The problem without the method's restrictions, from `unrestricted`, if it was made already.
    """
    return Record(_program(back), _Problem(back, free or unrestricted(back.formulation)).make(limit))


def unrestricted(solved: Formulation) -> Formulation:
    """A problem without its method's restrictions, which has the forbidden strategies as well."""
    if not solved.restrictions.allowed:
        return solved
    allowed = replace(solved.restrictions, allowed={})
    return Formulation(solved.pricer, solved.folded, solved.live, allowed)


def _program(back: Readback) -> RecordedProgram:
    graph, grouping, columns = back.graph, back.grouping, back.graph.columns
    numbers, nests = np.unique(columns.signature, return_inverse=True)
    examples = {n: i for i, n in enumerate(columns.signature.tolist())}
    labels: dict[str, int] = {}
    sources: dict[str, int] = {}
    named = [(f"{op.scope}/{op.primitive}" if op.scope else op.primitive) for op in graph.ops]
    lines = _sources(graph.ops)
    assignments: dict[tuple[int, ...], int] = {}
    run, lap = laps(back.grouping, back.folded)
    group = grouping.placed.group
    return RecordedProgram(
        types=[(kind.shape, kind.dtype, kind.itemsize) for kind in graph.kinds],
        kind=graph.kind,
        code=back.made,
        inputs=graph.input_paths,
        outputs=graph.output_paths,
        made=np.array(graph.outputs, np.int64),
        taken=np.array([graph.state.get(i, -1) for i in range(len(graph.outputs))], np.int64),
        nests=[plain_nest(grouping.nests[examples[n]]) for n in numbers.tolist()],
        nest=nests,
        label=np.array([labels.setdefault(name, len(labels)) for name in named], np.int64),
        labels=list(labels),
        source=np.array([sources.setdefault(line, len(sources)) for line in lines], np.int64),
        sources=list(sources),
        assignment=np.array(
            [VIRTUAL if loops is None else assignments.setdefault(loops, len(assignments)) for loops in _loops(back)],
            np.int64,
        ),
        assignments=list(assignments),
        phases=PHASES,
        phase=columns.phase,
        trips=columns.trips,
        reads=columns.reads,
        start=columns.start,
        first_made=columns.first_made,
        node=np.where(group >= 0, np.array(back.folded.group_class, np.int64)[group], -1),
        run=np.where(group >= 0, run[group], -1),
        lap=np.where(group >= 0, lap[group], -1),
    )


def plain_nest(nest: LoopNest) -> Nest:
    """A loop nest as a record keeps it."""
    loops = nest.loops
    return Nest([loop.size for loop in loops], [loop.kind for loop in loops], nest.operands, nest.results, nest.flops)


def _sources(ops: Sequence[Op]) -> list[str]:
    """Source lines; equations that JAX traced at one place share its information on it."""
    known: dict[int, str] = {}
    found = []
    for op in ops:
        place = id(op.equation.source_info.traceback) if op.equation is not None else 0
        if place not in known:
            known[place] = op.source
        found.append(known[place])
    return found


def _loops(back: Readback) -> list[tuple[int, ...] | None]:
    """For each operation the loop that each axis splits; None for virtual operations."""
    placed, rank = back.grouping.placed.group.tolist(), back.grouping.ops.rank.tolist()
    classes, tables = back.folded.group_class, back.formulation.tables
    known: dict[tuple[int, int], tuple[int, ...]] = {}
    found: list[tuple[int, ...] | None] = []
    for group, member in zip(placed, rank, strict=True):
        if group < 0:
            found.append(None)
            continue
        which = classes[group]
        if (which, member) not in known:
            known[which, member] = tuple(tables[which].assignments[member][back.choice[which]].tolist())
        found.append(known[which, member])
    return found


class _Problem:
    """The problem with all strategies, in which strategies that the method forbids are marked."""

    def __init__(self, back: Readback, free: Formulation):
        self.back, self.graph, self.grouping, self.folded = back, back.graph, back.grouping, back.folded
        self.solved, self.free = back.formulation, free

    def make(self, limit: float | None) -> Problem:
        free, memory = self.free, self.free.memory
        nodes = [self._node(which) for which in range(free.num_groups)]
        nodes += [self._shared(which) for which in range(free.num_groups, len(free.costs))]
        extra = [
            (which, cost - sent)
            for which, cost in enumerate(free.costs[: free.num_groups])
            if not np.array_equal(cost, sent := free.tables[which].compute + free.tables[which].communication)
        ]
        return Problem(
            sizes=free.mesh.sizes,
            nodes=nodes,
            edges=self._edges(),
            extra=extra,
            num_steps=memory.num_steps,
            column_class=memory.column_class,
            column_bytes=memory.column_bytes,
            role=[MEMORY_ROLES.index(name) for name in memory.roles],
            column=memory.column,
            start=memory.start,
            stop=memory.stop,
            share=memory.share,
            choice=self._numbered(self.back.choice),
            unlimited=self._numbered([] if self.back.unlimited is None else self.back.unlimited),
            limit=limit,
        )

    def _allowed(self, which: int) -> NDArray[np.bool_]:
        table, argument = self.free.tables[which], self.grouping.groups[self.folded.members[which][0]].argument
        allowed = self.solved.restrictions.allowed.get(argument) if argument is not None else None
        if allowed is None or not table.codes:
            return np.ones(len(table.compute), bool)
        return np.isin(table.codes[0], sorted(allowed))

    def _numbered(self, choice: Iterable[int]) -> Ints:
        """The numbers of the chosen strategies among all strategies."""
        return np.array([self._number(which, int(chosen)) for which, chosen in enumerate(choice)], np.int64)

    def _number(self, which: int, choice: int) -> int:
        if which < self.free.num_groups:
            return int(np.flatnonzero(self._allowed(which))[choice])
        order = which - self.free.num_groups
        code = self.solved.shared_codes[order][choice]
        return int(np.searchsorted(self.free.shared_codes[order], code))

    def _node(self, which: int) -> Node:
        table, members = self.free.tables[which], self.folded.members[which]
        group = self.grouping.groups[members[0]]
        graph, paths = self.graph, []
        if group.argument is not None:
            paths = [graph.input_paths[self.grouping.groups[m].argument or 0] for m in members]
            label, phase, value = _pattern(paths), -1, group.argument
        else:
            assert group.leader is not None
            op = graph.ops[group.leader]
            label, phase, value = op.label, PHASES.index(op.phase), op.outputs[0]
        sent = [(kind, axes, seconds) for (kind, axes), seconds in sorted(table.sent.items()) if seconds.any()]
        codes = table.codes[0] if table.codes else np.zeros(len(table.compute), np.int64)
        kind = int(graph.kind[value])
        return Node(label, phase, len(members), paths, kind, codes, table.compute, sent, self._allowed(which))

    def _shared(self, which: int) -> Node:
        order = which - self.free.num_groups
        members, codes = self.folded.shared_members[order], self.free.shared_codes[order]
        reading = self.folded.shared[members[0]]
        label, kind = f"copy of {self._name(reading.value)}", int(self.graph.kind[reading.value])
        zeros, phase = np.zeros(len(codes)), PHASES.index(reading.phase)
        return Node(label, phase, len(members), (), kind, codes, zeros, (), np.ones(len(codes), bool))

    def _name(self, value: int) -> str:
        producer = self.graph.producer.get(value)
        if producer is not None:
            return self.graph.ops[producer].label
        return _NUMBER.sub("*", self.graph.input_paths[value]) if value < len(self.graph.inputs) else "a constant"

    def _edges(self) -> list[Edge]:
        free, found = self.free, []
        for key, (count, _) in free.edges.items():
            source, place, reader, slot = key
            copied, joins = free.copied[key], tuple[Any, ...]()
            if copied.saved is not None:
                joins = (free.tables[source].offers, free.tables[source].settling, free.tables[reader].takes[slot])
            shardings = (copied.made, copied.needed, copied.free)
            rows, columns = (
                np.unique(codes, return_index=True)[1] for codes in (copied.made, 2 * copied.needed + copied.free)
            )
            value = free.value_of(source, place)
            kind = int(self.graph.kind[value])
            about = (count, self._name(value), kind, self.graph.kinds[kind].num_bytes)
            table = copied.resharding[np.ix_(rows, columns)]
            lives: tuple[Any, ...] = copied.live
            found.append(Edge(*key, *about, *shardings, table, *lives, *joins))
        return found


def _pattern(paths: Sequence[str]) -> str:
    """The common form of the paths, with ``*`` for numbers that differ."""
    if len(paths) == 1:
        return paths[0]
    split = [_NUMBER.split(path) for path in paths]
    numbers = [_NUMBER.findall(path) for path in paths]
    if any(parts != split[0] for parts in split):
        return paths[0]
    varying = ["*" if len(set(column)) > 1 else column[0] for column in zip(*numbers, strict=True)]
    return "".join(text for pair in zip(split[0], [*varying, ""], strict=True) for text in pair)
