"""The record of a pipelined plan: the whole program on each view that stages have, and which part of it a stage is.

Stages are priced as parts of one solve of the whole model (`pipeline.prices`), so one record serves all stages that
have the same view; cut down to a stage's layers, it is a record like that of a plan without stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.explain.record import MEMORY_ROLES, Edge, Ints, Kept, Node, Problem, Program, Record

Array = NDArray[np.float64]
_ACTIVATIONS = MEMORY_ROLES.index("activations")


@dataclass(frozen=True)
class View(Kept):
    """One view that stages have: their inner axis, and the rows that each replica works on.

    Attributes:
        record: The whole program of one microbatch, and the problem that was solved for a replica and all layers.
        rows: A replica's rows; at most those of the stages, where these lie between two numbers that were priced.
        member_node, member_unit: Everything that nodes tie together: its node and its unit.
        once: Seconds of nodes that are spent once a step, not with every microbatch: ``(node, for each strategy)``.
        held: Arguments that the first spans of memory are of.
        sent_kinds: Distinct communication: ``(kind, axes, bytes, seconds, phase, operation, source, purpose, trips)``.
        sent, sent_op: Which of these happens, and at which operation.
    """

    record: Record
    rows: int
    member_node: Ints
    member_unit: Ints
    once: Sequence[tuple[int, Array]]
    held: Ints
    sent_kinds: Sequence[Sequence[Any]]
    sent: Ints
    sent_op: Ints


@dataclass(frozen=True)
class StagedRecord(Kept):
    """What a pipelined plan keeps of the program and of the search.

    Attributes:
        views: The views.
        view: The number of each stage's view.
        unit: The unit of each operation.
        first, count: The first layer of each unit, and how many layers it has.
        argument_unit: The unit that each argument belongs to.
    """

    views: Sequence[View]
    view: Sequence[int]
    unit: Ints
    first: Ints
    count: Ints
    argument_unit: Ints

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "StagedRecord":
        """What `to_data` gave."""
        views = [View(**(view | {"record": Record.from_data(view["record"])})) for view in data["views"]]
        return cls(**(data | {"views": views}))

    def share(self, chunks: Sequence[tuple[int, int]]) -> Array:
        """The share of each unit that some chunks of layers have."""
        end = self.first + self.count
        parts = [np.clip(np.minimum(b, end) - np.maximum(a, self.first), 0, None) for a, b in chunks]
        return np.sum(parts, axis=0) / self.count


@dataclass(frozen=True)
class StageMemory:
    """What a stage holds that one microbatch of the program does not show.

    Attributes:
        others_bytes: Activations of the microbatches in flight besides the one that is worked on.
        replicas: For each of `MEMORY_ROLES`, over how many replicas what it is about is spread.
        peak_bytes: What the stage was found to need at the most.
    """

    others_bytes: float
    replicas: Sequence[int]
    peak_bytes: int


def cut(view: View, unit: Ints, argument_unit: Ints, share: Array, memory: StageMemory) -> Record:
    """The record of one stage.

    Args:
        view: The stage's view.
        unit: The unit of each operation.
        argument_unit: The unit of each argument.
        share: The share of each unit that the stage has.
        memory: What the stage holds.
    """
    problem, number = _Cut(view, unit, argument_unit, share).problem(memory)
    program = view.record.program
    node = np.where(program.node >= 0, number[program.node], -1)
    return Record(replace(program, trips=program.trips * share[unit], node=node), problem)


class _Cut:
    """Nodes are counted as often as they occur in the stage; what comes from other stages is as it was chosen."""

    def __init__(self, view: View, unit: Ints, argument_unit: Ints, share: Array):
        self.view, self.whole, self.share = view, view.record.problem, share
        self.unit, self.argument_unit = unit, argument_unit
        size = len(self.whole.nodes)
        self.num = np.bincount(view.member_node, share[view.member_unit], size)
        read = [(e, float(share[unit[e.start]].sum())) for e in self.whole.edges if self.num[e.reader] > 0]
        self.edges = [(e, num) for e, num in read if num > 0]
        self.inside = self.num > 0
        kept = self.inside.copy()
        kept[[e.source for e, _ in self.edges]] = True
        self.kept = np.flatnonzero(kept)
        self.number = np.full(size, -1)
        self.number[self.kept] = np.arange(len(self.kept))

    def problem(self, memory: StageMemory) -> tuple[Problem, Ints]:
        """The problem, and the number that each node has in it."""
        found = replace(
            self.whole,
            nodes=[self._node(i) for i in self.kept.tolist()],
            edges=[self._edge(edge, num) for edge, num in self.edges],
            extra=[(int(self.number[i]), cost) for i, cost in self.whole.extra if self.inside[i]],
            choice=np.where(self.inside, self.whole.choice, 0)[self.kept],
            **self._memory(memory),
        )
        # The sums over layers that stages were found by know more of memory than one pass does: they set the level.
        peak = found.memory.profile(found.choice, found.copies_made(found.choice)).peak_bytes
        limit = None if found.limit is None else found.limit + peak - memory.peak_bytes
        return replace(found, limit=limit), self.number

    def _node(self, which: int) -> Node:
        node, chosen = self.whole.nodes[which], int(self.whole.choice[which])
        if not self.inside[which]:
            codes, none, one = node.codes[[chosen]], np.zeros(1), np.ones(1, bool)
            label = f"{node.label}, from another stage"
            return replace(node, label=label, num=1, paths=(), codes=codes, compute=none, sent=(), allowed=one)
        here = self.share[self.view.member_unit[self.view.member_node == which]] > 0
        paths = [path for path, is_here in zip(node.paths, here.tolist(), strict=False) if is_here]
        return replace(node, num=float(self.num[which]), paths=paths)

    def _edge(self, edge: Edge, num: float) -> Edge:
        here = self.share[self.unit[edge.start]] > 0
        found = replace(
            edge,
            source=int(self.number[edge.source]),
            reader=int(self.number[edge.reader]),
            num=num,
            start=edge.start[here],
            stop=edge.stop[here],
        )
        if self.inside[edge.source]:
            return found
        row = int(np.searchsorted(np.unique(edge.made), made := edge.made[self.whole.choice[edge.source]]))
        return replace(found, made=np.array([made]), table=edge.table[[row]])

    def _memory(self, memory: StageMemory) -> dict[str, Any]:
        """The spans of what the stage makes and holds."""
        whole = self.whole
        unit = self.unit[np.minimum(whole.start, len(self.unit) - 1)]
        unit[: len(self.view.held)] = self.argument_unit[self.view.held]
        role = np.array(whole.role, np.int64)[whole.column]
        columns = np.array(whole.column_class, np.int64)
        share = whole.share * self.share[unit] / np.array(memory.replicas)[role] * self.inside[columns[whole.column]]
        spans = [whole.column, whole.start, whole.stop, share]
        waits = self._waiting(role)
        chosen = np.array([size[s] for size, s in zip(whole.column_bytes, whole.choice[columns], strict=True)])
        if held := float((share * chosen[whole.column])[waits].sum()):
            always = np.zeros(int(waits.sum()), np.int64), np.full(int(waits.sum()), whole.num_steps)
            more = [whole.column[waits], *always, memory.others_bytes / held * share[waits]]
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
        """Spans of activations that wait for the backward pass."""
        program: Program = self.view.record.program
        backward = np.flatnonzero(program.phase == program.phases.index("backward"))
        if not len(backward):
            return np.zeros(len(role), bool)
        return (role == _ACTIVATIONS) & (self.whole.start < backward[0]) & (self.whole.stop > backward[0])
