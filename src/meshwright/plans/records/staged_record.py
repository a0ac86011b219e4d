"""The record of a pipelined plan: the whole program on each view of the stages, and the part of each stage.

Stages are priced as parts of one solve of the whole model (`pipeline.prices`), so one record serves all stages that
have the same view; cut down to a stage's layers, it is a record like that of a plan without stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Floats, Ints
from meshwright.plans.records.record import MEMORY_ROLES, Edge, Node, Problem, Record
from meshwright.plans.records.traced_program import Kept, RecordedProgram

_APART: dict[str, Any] = {name: np.zeros(0) for name in ("offers", "settling", "takes")}  # no merged reductions
_ACTIVATIONS = MEMORY_ROLES.index("activations")


@dataclass(frozen=True)
class StageView(Kept):
    """One view of some stages: their inner axis, and the rows of each replica.

    Attributes:
        record: The whole program of one microbatch, and the problem that was solved for a replica and all layers.
        rows: A replica's rows; fewer than those of the stages where these are between two priced numbers.
        member_node, member_unit: The node and the unit of each member that nodes tie together.
        source_unit: The unit that each edge's occurrences come from, edge after edge.
        held: The arguments of the first spans of memory.
        sent_kinds: Distinct collectives: ``(kind, axes, bytes, seconds, phase, operation, source, purpose, trips)``.
        sent, sent_op: The index of each collective that occurs, and its operation.
        ops: How a replica splits its operations, as rows of `plan_files.stored_operations`; none in a replica of one
            device, and in plans of earlier versions.
    """

    record: Record
    rows: int
    member_node: Ints
    member_unit: Ints
    source_unit: Ints
    held: Ints
    sent_kinds: Sequence[Sequence[Any]]
    sent: Ints
    sent_op: Ints
    ops: Sequence[Any] = ()


@dataclass(frozen=True)
class StagedRecord(Kept):
    """A pipelined plan's record of its program and of the search.

    Attributes:
        views: The views.
        view: The number of each stage's view.
        unit: The unit of each operation.
        first, count: The first layer of each unit, and how many layers it has.
        argument_unit: The unit that each argument belongs to.
    """

    views: Sequence[StageView]
    view: Sequence[int]
    unit: Ints
    first: Ints
    count: Ints
    argument_unit: Ints

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "StagedRecord":
        """The inverse of `to_data`."""
        views = [StageView(**(view | {"record": Record.from_data(view["record"])})) for view in data["views"]]
        return cls(**(data | {"views": views}))

    def share(self, chunks: Sequence[tuple[int, int]]) -> Floats:
        """The share of each unit that some chunks of layers have."""
        end = self.first + self.count
        parts = [np.clip(np.minimum(b, end) - np.maximum(a, self.first), 0, None) for a, b in chunks]
        return np.sum(parts, axis=0) / self.count


@dataclass(frozen=True)
class StageMemory:
    """A stage's memory beyond one microbatch of the program.

    Attributes:
        others_bytes: Activations of the microbatches in flight besides the current one.
        replicas: For each of `MEMORY_ROLES`, the number of replicas over which its values are sharded.
        peak_bytes: The stage's peak memory according to the search.
    """

    others_bytes: float
    replicas: Sequence[int]
    peak_bytes: int


def cut(view: StageView, unit: Ints, argument_unit: Ints, share: Floats, memory: StageMemory) -> Record:
    """The record of one stage.

    Args:
        view: The stage's view.
        unit: The unit of each operation.
        argument_unit: The unit of each argument.
        share: The share of each unit that the stage has.
        memory: The stage's memory.
    """
    problem, number = _Cut(view, unit, argument_unit, share).problem(memory)
    program = view.record.program
    node = np.where(program.node >= 0, number[program.node], -1)
    return Record(replace(program, trips=program.trips * share[unit], node=node), problem)


class _Cut:
    """Cuts out a stage: nodes count as often as they occur in it; other stages keep their choices."""

    def __init__(self, view: StageView, unit: Ints, argument_unit: Ints, share: Floats):
        self.view, self.whole, self.share = view, view.record.problem, share
        self.unit, self.argument_unit = unit, argument_unit
        size = len(self.whole.nodes)
        self.num = np.bincount(view.member_node, share[view.member_unit], size)
        self.inside = self.num > 0
        self.kept = np.flatnonzero(self.inside).tolist()
        self.number = np.full(size, -1)
        self.number[self.kept] = np.arange(len(self.kept))
        self.outside: dict[int, int] = {}  # neighbouring nodes in other stages, and their numbers here

    def problem(self, memory: StageMemory) -> tuple[Problem, Ints]:
        """The problem, and the number that each node has in it."""
        edges = list(self._edges())
        part = replace(
            self.whole,
            nodes=[*map(self._node, self.kept), *map(self._met, self.outside)],
            edges=edges,
            extra=[(int(self.number[i]), cost) for i, cost in self.whole.extra if self.inside[i]],
            once=[(int(self.number[i]), cost) for i, cost in self.whole.once if self.inside[i]],
            choice=np.concatenate([self.whole.choice[self.kept], np.zeros(len(self.outside), np.int64)]),
            unlimited=np.zeros(0, np.int64),
            **self._memory(memory),
        )
        # The search's sums over layers model memory better than one pass does, so they set the level.
        peak = part.memory.profile(part.choice, part.copies_made(part.choice)).peak_bytes
        limit = None if part.limit is None else part.limit + peak - memory.peak_bytes
        return replace(part, limit=limit), self.number

    def _node(self, which: int) -> Node:
        node = self.whole.nodes[which]
        here = self.share[self.view.member_unit[self.view.member_node == which]] > 0
        paths = [path for path, is_here in zip(node.paths, here.tolist(), strict=False) if is_here]
        return replace(node, num=float(self.num[which]), paths=paths)

    def _met(self, which: int) -> Node:
        """A node of another stage, with its chosen strategy alone."""
        node = self.whole.nodes[which]
        codes, label = node.codes[self.whole.choice[[which]]], f"{node.label} of another stage"
        return replace(
            node, label=label, num=1, paths=(), codes=codes, compute=np.zeros(1), sent=(), allowed=np.ones(1, bool)
        )

    def _outside(self, which: int) -> int:
        return self.outside.setdefault(which, len(self.kept) + len(self.outside))

    def _edges(self) -> Iterator[Edge]:
        """Edges within the stage, from earlier ones to it, and from it to later ones."""
        first = 0
        for edge in self.whole.edges:
            making, reading = (
                self.share[unit]
                for unit in (self.view.source_unit[first : first + len(edge.start)], self.unit[edge.start])
            )
            first += len(edge.start)
            inner, comes, goes = (
                (making > 0) & (reading > 0),
                (making == 0) & (reading > 0),
                (making > 0) & (reading == 0),
            )
            if inner.any() and self.inside[edge.source] and self.inside[edge.reader]:
                yield self._edge(edge, inner, float(reading[inner].sum()))
            if comes.any() and self.inside[edge.reader]:
                yield self._coming(self._edge(edge, comes, float(reading[comes].sum())), edge)
            if goes.any() and self.inside[edge.source]:
                yield self._going(self._edge(edge, np.zeros(len(goes), bool), float(making[goes].sum())), edge)

    def _edge(self, edge: Edge, some: NDArray[np.bool_], num: float) -> Edge:
        ends = int(self.number[edge.source]), int(self.number[edge.reader])
        times = {name: part[some] for name in ("start", "stop", "ahead", "cut") if len(part := getattr(edge, name))}
        return replace(edge, source=ends[0], reader=ends[1], num=num, **times)

    def _coming(self, found: Edge, edge: Edge) -> Edge:
        row, sharding = self._row(edge)
        return replace(found, source=self._outside(edge.source), made=sharding, table=edge.table[[row]], **_APART)

    def _going(self, found: Edge, edge: Edge) -> Edge:
        """The extra cost of the next stage if it received the value in another sharding."""
        chosen = self.whole.choice[[edge.reader]]
        keys = 2 * edge.needed + edge.free
        column = np.searchsorted(np.unique(keys), keys[chosen])
        table = edge.table[:, column]
        more = np.maximum(table - table[self._row(edge)[0]], 0.0)
        reader = self._outside(edge.reader)
        return replace(found, reader=reader, needed=edge.needed[chosen], free=edge.free[chosen], table=more, **_APART)

    def _row(self, edge: Edge) -> tuple[int, Ints]:
        """The row of an edge's table, and the sharding, in which its source makes the value."""
        sharding = edge.made[self.whole.choice[[edge.source]]]
        return int(np.searchsorted(np.unique(edge.made), sharding[0])), sharding

    def _memory(self, memory: StageMemory) -> dict[str, Any]:
        """The spans of the values that the stage computes and holds."""
        whole = self.whole
        unit = self.unit[np.minimum(whole.start, len(self.unit) - 1)]
        unit[: len(self.view.held)] = self.argument_unit[self.view.held]
        role = np.array(whole.role, np.int64)[whole.column]
        columns = np.array(whole.column_class, np.int64)
        share = whole.share * self.share[unit] / np.array(memory.replicas)[role] * self.inside[columns[whole.column]]
        spans = [whole.column, whole.start, whole.stop, share]
        waits = self._waiting(role)
        chosen = np.array([size[s] for size, s in zip(whole.column_bytes, whole.choice[columns], strict=True)])
        if share_bytes := float((share * chosen[whole.column])[waits].sum()):
            always = np.zeros(int(waits.sum()), np.int64), np.full(int(waits.sum()), whole.num_steps)
            more = [whole.column[waits], *always, memory.others_bytes / share_bytes * share[waits]]
            spans = [np.concatenate(pair) for pair in zip(spans, more, strict=True)]
        kept = spans[3] > 0
        used, column = np.unique(spans[0][kept], return_inverse=True)
        return {
            "column_class": self.number[columns[used]].tolist(),
            "column_bytes": [whole.column_bytes[i] for i in used.tolist()],
            "role": [whole.role[i] for i in used.tolist()],
            "column": column,
            "start": spans[1][kept],
            "stop": spans[2][kept],
            "share": spans[3][kept],
        }

    def _waiting(self, role: Ints) -> NDArray[np.bool_]:
        """Spans of activations that are kept for the backward pass."""
        program: RecordedProgram = self.view.record.program
        backward = np.flatnonzero(program.phase == program.phases.index("backward"))
        if not len(backward):
            return np.zeros(len(role), bool)
        return (role == _ACTIVATIONS) & (self.whole.start < backward[0]) & (self.whole.stop > backward[0])
