"""The programs that the page shows: the plan's own, or one for all stages with the same split.

A layer is drawn as a graph of groups and their communication; operations are a list, and blocks a table where the
traced program is known.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.parallelism.axis_uses import AxisFacts
from meshwright.parallelism.notation import notation
from meshwright.parallelism.subject.memory_timeline import memory_over_time
from meshwright.parallelism.subject.subject import Subjects
from meshwright.parallelism.words import label_words
from meshwright.plans.records.record import MEMORY_ROLES, Record
from meshwright.plans.records.traced_program import VIRTUAL, RecordedProgram
from meshwright.plans.text import stages_text
from meshwright.strategy.reshard import SLICE, Resharding

if TYPE_CHECKING:
    from meshwright.hardware import Mesh
    from meshwright.plans.plan import PlanData

_MOMENTS, _FEWEST = 480, 12  # of memory over time, and of one microbatch
_MOST_GROUPS = 160  # in one drawing
_LAPS = 2  # neighbouring layers may differ: two of them are shown


def programs_data(plan: "PlanData", subjects: Subjects) -> list[dict[str, Any]]:
    """Layers and operations of each program, memory over time of a plan without stages."""
    if not plan.stages:
        return [
            {"name": "", **layer_data(plan.mesh, s.facts), "timeline": _timeline(s.record, plan.microbatches)}
            for s in subjects
        ]
    data_of: dict[int, dict[str, Any]] = {}
    stages: dict[int, list[int]] = {}
    for number in range(len(subjects)):
        view = plan.staged_record.view[number]
        stages.setdefault(view, []).append(number)
        if view not in data_of:
            data_of[view] = layer_data(plan.stages[number].mesh, subjects.whole(number), late="x")
    return [{"name": stages_text(stages[view]), **data} for view, data in data_of.items()]


def _timeline(record: Record, num_parts: int) -> dict[str, Any]:
    """Memory over a step: what comes before the update is in the program once, and runs once for each microbatch."""
    whole, phases = memory_over_time(record.problem), record.program.phases
    thin = whole.thinned(max(_MOMENTS // num_parts, _FEWEST))
    used = [i for i in range(len(MEMORY_ROLES)) if thin.by_role[i].any()]
    before = np.flatnonzero(record.program.phase != phases.index("update"))
    length = int(before[-1]) + 1 if len(before) else 0  # of a microbatch, in operations
    part, rest = np.flatnonzero(thin.at < length), np.flatnonzero(thin.at >= length)
    order = np.concatenate([np.tile(part, num_parts), rest])
    number = np.concatenate([np.repeat(np.arange(num_parts), len(part)), np.full(len(rest), num_parts - 1)])
    op = thin.at[order]
    return {
        "num_ops": len(whole.at) + (num_parts - 1) * length,
        "num_parts": num_parts,
        "at": (op + number * length).tolist(),
        "op": op.tolist(),
        "part": number.tolist(),
        "roles": {MEMORY_ROLES[i]: thin.by_role[i, order].round().astype(int).tolist() for i in used},
        "phase": [phases[record.program.phase[one]] for one in op.tolist()],
    }


def layer_data(mesh: "Mesh", facts: AxisFacts, late: str = "") -> dict[str, Any]:
    """Graphs of the repeated layers (of the whole program where nothing repeats), and all operations.

    Args:
        mesh: The mesh that the program is split over.
        facts: The uses of its axes.
        late: The axis over which gradients are summed once a step, after all microbatches; empty for none.
    """
    layers = _Layers(mesh, facts, late)
    return {"layers": layers.graphs(), "operations": layers.operations()}


class _Layers:
    def __init__(self, mesh: "Mesh", facts: AxisFacts, late: str):
        self.facts, self.late = facts, late
        self.program: RecordedProgram = facts.program
        self.resharding = Resharding(mesh, self.facts.axes)
        self._notations: dict[tuple[Any, ...], str] = {}
        self._sent: dict[tuple[int, int, int], list[str]] = {}

    def graphs(self) -> list[dict[str, Any]]:
        program, graphs = self.program, []
        for run in range(int(program.run.max(initial=-1)) + 1):
            laps = int(program.lap[program.run == run].max(initial=-1)) + 1
            for lap in range(min(laps, _LAPS)):
                ops = np.flatnonzero((program.run == run) & (program.lap == lap)).tolist()
                phase = program.phases[program.phase[ops[0]]]
                which = {0: "odd", 1: "even"}[lap] if laps > 2 else f"number {lap + 1}"
                name = f"{phase}, {which} layers ({(laps + 1 - lap) // 2 if laps > 2 else 1} of {laps})"
                graphs.append(self._graph(name, ops))
        rest = np.flatnonzero((program.run < 0) & (program.node >= 0)).tolist()
        for number, phase in enumerate(program.phases):
            ops = [op for op in rest if program.phase[op] == number]
            if ops:
                graphs.append(self._graph(f"{phase}, what does not repeat", ops))
        return [graph for graph in graphs if graph["nodes"]]

    def _graph(self, name: str, ops: list[int]) -> dict[str, Any]:
        """Groups as nodes; an edge carries the collectives of a value that is read in another sharding than it was
        made."""
        program = self.program
        by_node: dict[int, list[int]] = {}
        for op in ops:
            by_node.setdefault(int(program.node[op]), []).append(op)
        groups = list(by_node.values())[:_MOST_GROUPS]
        home = {value: i for i, members in enumerate(groups) for op in members for value in program.made_by(op)}
        nodes = [self._node(members) for members in groups]
        edges: dict[tuple[int, int], dict[str, Any]] = {}
        for i, members in enumerate(groups):
            for op in members:
                for position, value in enumerate(program.reads_of(op)):
                    self._read(op, position, value, i, home, nodes, edges)
        return {"name": name, "nodes": nodes, "edges": list(edges.values()), "left": len(by_node) - len(groups)}

    def _read(
        self, op: int, position: int, value: int, reader: int, home: dict[int, int], nodes: list, edges: dict
    ) -> None:
        sent = self._resharded(op, position, value)
        source = home.get(value)
        if source is None:
            weight = self.facts.parameter_of(value)
            if weight >= 0:
                collectives = nodes[reader]["reads"].setdefault(self.program.inputs[weight], [])
                collectives += [s for s in sent if s not in collectives]
            return
        if source == reader:
            nodes[reader]["sent"] += [s for s in sent if s not in nodes[reader]["sent"]]
            return
        edge = edges.setdefault((source, reader), {"from": source, "to": reader, "sent": []})
        edge["sent"] += [s for s in sent if s not in edge["sent"]]

    def _node(self, members: list[int]) -> dict[str, Any]:
        program = self.program
        leader = max(members, key=lambda op: (program.nests[int(program.nest[op])].flops, -op))
        nest = program.nests[int(program.nest[leader])]
        return {
            "label": label_words(program.labels[int(program.label[leader])]),
            "phase": program.phases[program.phase[leader]],
            "notation": self._notation(leader),
            "source": program.sources[program.source[leader]],
            "flops": nest.flops * float(program.trips[leader]),
            "num_ops": len(members),
            "sent": list(dict.fromkeys(s for op in members for s in self._settled(op))),
            "reads": {},
        }

    def _settled(self, op: int) -> list[str]:
        """How the partial sums of an operation are reduced."""
        program = self.program
        if program.assignment[op] == VIRTUAL:
            return []
        nest, assigned = program.nests[int(program.nest[op])], program.assignments[program.assignment[op]]
        results = program.made_by(op)
        if not results:
            return []
        indexed = {loop for dim in nest.results[0] for loop in dim}
        after = self.facts.axes.unpack(int(program.code[results[0]])).tolist()
        ways = []
        for axis, loop in enumerate(assigned):
            if loop >= 0 and loop not in indexed and nest.kinds[loop] not in ("parallel", "unsplittable"):
                kind = "reduce_scatter" if after[axis] >= 0 else "all_reduce"
                name = self.facts.names[axis]
                ways.append(f"sum over {name} once a step" if name == self.late else f"{kind} over {name}")
        return ways

    def _resharded(self, op: int, position: int, value: int) -> list[str]:
        """The collectives that reshard a value for an operation."""
        program, facts = self.program, self.facts
        shape = program.shape(value)
        if not shape or program.assignment[op] == VIRTUAL or not self._is_real(value):
            return []
        nest, assigned = program.nests[int(program.nest[op])], program.assignments[program.assignment[op]]
        dims = nest.operands[position]
        spec = tuple(tuple(a for a, loop in enumerate(assigned) if loop >= 0 and loop in dim) for dim in dims)
        key = (int(program.kind[value]), int(program.code[value]), facts.axes.code(spec))
        if key not in self._sent:
            itemsize = program.types[key[0]][2]
            hops = self.resharding.path(shape, itemsize, key[1], key[2]) if key[1] != key[2] else []
            named = [f"{h.kind} over {', '.join(facts.names[a] for a in h.axes)}" for h in hops if h.kind != SLICE]
            self._sent[key] = named
        return self._sent[key]

    def _is_real(self, value: int) -> bool:
        producer = int(self.program.producer[value])
        return value < len(self.program.inputs) or (producer >= 0 and self.program.node[producer] >= 0)

    def _notation(self, op: int) -> str:
        """An operation in symbols; those of tied layers are the same."""
        program = self.program
        key = (int(program.nest[op]), int(program.assignment[op]), int(program.node[op]), int(program.label[op]))
        if key not in self._notations:
            self._notations[key] = notation(self.facts, op)
        return self._notations[key]

    def operations(self) -> dict[str, Any]:
        """All operations as columns of numbers, with the tables that they index."""
        program = self.program
        texts: dict[str, int] = {}
        virtual = "as its readers need it"
        written = [
            texts.setdefault(virtual if program.assignment[op] == VIRTUAL else self._notation(op), len(texts))
            for op in range(program.num_ops)
        ]
        labels: dict[str, int] = {}
        label = [labels.setdefault(label_words(text), len(labels)) for text in program.labels]
        return {
            "phases": program.phases,
            "labels": list(labels),
            "notations": list(texts),
            "sources": program.sources,
            "label": [label[number] for number in program.label.tolist()],
            "notation": written,
            "source": program.source.tolist(),
            "phase": program.phase.tolist(),
            "lap": program.lap.tolist(),
        }


def blocks_data(plan: "PlanData") -> dict[str, Any] | None:
    """The sequence of segments and the blocks of each; None where the program is not known."""
    if plan.origin is None:
        return None
    from meshwright.blocks import blocks_of  # here, since plans from files are reported without JAX
    from meshwright.runtime.microbatches.planned_parts import traced_as_planned

    blocks = blocks_of(traced_as_planned(plan, plan.origin).graph)
    if not blocks.blocks:
        return None
    order = sorted(
        (numbers[0], place, len(numbers), segment.trips)
        for place, segment in enumerate(blocks.segments)
        for numbers in segment.block_numbers
    )
    rows = [
        {
            "segment": place,
            "number": number,
            "name": blocks.blocks[number].entries[0].name,
            "choices": ", ".join(blocks.blocks[number].choices),
            "operations": len(blocks.blocks[number].operations),
            "times": segment.count,
        }
        for place, segment in enumerate(blocks.segments)
        for number in segment.blocks
    ]
    segments = [{"fingerprint": s.fingerprint, "space": s.space} for s in blocks.segments]
    runs = [{"first": first, "segment": place, "size": size, "trips": trips} for first, place, size, trips in order]
    return {"segments": segments, "runs": runs, "rows": rows, "count": len(blocks.blocks)}
