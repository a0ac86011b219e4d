"""Assigns the operations and arguments of a traced step to the virtual stages of a plan.

The plan's record has the layers of every operation of the graph. Here they are found for the units of the step that is
cut into microbatches, which the tracer numbers in the same order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.arrays import Bools
from meshwright.cost.xla_gpu.liveness import held_for_backward, liveness
from meshwright.errors import ShardingError
from meshwright.graph import Graph
from meshwright.graph.graph import Columns
from meshwright.graph.phases import FORWARD, PHASES, UPDATE
from meshwright.plans.plan import PlanData
from meshwright.plans.records.staged_record import StagedRecord
from meshwright.program.program import Program
from meshwright.rules import loop_nest
from meshwright.runtime.microbatches.part import Key, Piece
from meshwright.runtime.program.matching import check_form
from meshwright.schedules.base import BACKWARD

Pass = tuple[str, int]  # forward or backward, and a virtual stage
Parts = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Assignment:
    """Where a step's units and arguments belong.

    Attributes:
        num_stages: How many stages there are; virtual stage ``v`` is a chunk of stage ``v % num_stages``.
        num_chunks: How many virtual stages there are.
        layer: For each unit, its layer; -1 where the plan knows none.
        unit: For each unit, the virtual stage of that layer, or -1.
        is_forward, is_update: For each unit, whether it belongs to the forward pass, or to the update.
        is_held: For each unit, whether its results are kept for the backward pass, which else computes them again.
        argument: For each argument's leaf, the stage that owns it.
        paths: The leaves' paths.
        state: For each result, the argument's leaf whose next value it is.
        donated: Leaves whose memory results may take over.
        spans: Operations that loop over layers of several virtual stages: ``(virtual stage, first trip, end)``.
        stacked: Leaves that such a loop slices, layer by layer, with the parts of its stages.
        pieces: Leaves that are some layers of such a stack, once it is split.
    """

    num_stages: int
    num_chunks: int
    layer: Sequence[int]
    unit: Sequence[int]
    is_forward: Sequence[bool]
    is_update: Sequence[bool]
    is_held: Sequence[bool]
    argument: Sequence[int]
    paths: Sequence[str]
    state: Mapping[int, int]
    donated: frozenset[int]
    spans: Mapping[int, "Parts"] = field(default_factory=dict)
    stacked: Mapping[int, "Parts"] = field(default_factory=dict)
    pieces: frozenset[int] = frozenset()


def assign(plan: PlanData, graph: Graph, program: Program) -> Assignment:
    """The assignment that a plan makes.

    Raises:
        ShardingError: The plan is for another function.
    """
    check_form(plan, program)
    record = plan.staged_record
    columns = graph.columns
    if len(record.unit) != len(columns.signature) or len(record.argument_unit) != len(graph.inputs):
        raise ShardingError(
            f"the plan was made for a program of {len(record.unit)} operations and {len(record.argument_unit)} "
            f"arguments, and this one has {len(columns.signature)} and {len(graph.inputs)}: make the plan again"
        )
    _check_operations(record, columns)
    chunks = _chunks(plan)
    layer_of = _chunk_of_layers(chunks)
    place = {int(serial): i for i, serial in enumerate(columns.serial)}
    holds = _holding(graph)
    layers, forward, update, held, spans = [], [], [], [], dict[int, Parts]()
    for number, unit in enumerate(program.operations):
        ops = [place[s] for s in range(unit.id, unit.id + unit.num_ids) if s in place]
        layers.append(_most([int(record.first[u]) for u in record.unit[ops]]))
        phases = {PHASES[columns.phase[i]] for i in ops}
        forward.append(phases <= {FORWARD})
        update.append(phases == {UPDATE})
        held.append(len(ops) != 1 or bool(holds[ops[0]]))
        if parts := next((p for u in set(record.unit[ops].tolist()) if len(p := _parts(record, u, chunks)) > 1), ()):
            spans[number] = parts
    virtual = [layer_of.get(layer, -1) for layer in layers]
    owners = [layer_of[int(record.first[unit])] % len(plan.stages) for unit in record.argument_unit]
    shapes = [graph.types[value].shape for value in graph.inputs]
    roles = [tensor.role for tensor in plan.arguments if tensor.role != "static"]
    found = (
        (leaf, layer_parts(plan, unit, shapes[leaf]))
        for leaf, unit in enumerate(record.argument_unit.tolist())
        if roles[leaf] != "data"
    )
    stacked = {leaf: parts for leaf, parts in found if parts}
    about = (graph.input_paths, dict(graph.state), frozenset(graph.donated), spans, stacked)
    return Assignment(
        len(plan.stages),
        len(chunks),
        layers,
        virtual,
        forward,
        update,
        held,
        owners,
        *about,
    )


def _holding(graph: Graph) -> Bools:
    """For each operation, whether the backward pass finds one of its results in memory, as the plan has it."""
    columns = graph.columns
    nests = {number: loop_nest(columns.signatures[number]) for number in columns.examples}
    live = liveness(graph, [nests[number] for number in columns.signature.tolist()])
    found = np.zeros(len(columns.signature), bool)
    found[columns.producer[held_for_backward(graph, live)]] = True
    return found


def _check_operations(record: StagedRecord, columns: Columns) -> None:
    """Refuses a program of as many, but other operations than the plan was made for."""
    program = record.views[0].record.program
    planned = [label.rpartition("/")[2] for label in program.labels]
    for number, label, signature in zip(range(len(program.label)), program.label, columns.signature, strict=True):
        found = columns.signatures[signature].primitive
        if planned[label] != found:
            raise ShardingError(
                f"the plan was made for another function: its operation {number} is {planned[label]}, and this one's "
                f"is {found}; make the plan again"
            )


def _most(layers: list[int]) -> int:
    return max(set(layers), key=layers.count) if layers else -1


def layer_parts(plan: PlanData, unit: int, shape: Sequence[int]) -> Parts:
    """The parts of an argument of a unit that is stacked over layers of several virtual stages; none of any other."""
    record = plan.staged_record
    parts = _parts(record, unit, _chunks(plan))
    return parts if len(parts) > 1 and shape and shape[0] == record.count[unit] else ()


def _chunks(plan: PlanData) -> list[tuple[int, int]]:
    """The layers of each virtual stage."""
    return [chunk for turn in zip(*(stage.chunks for stage in plan.stages), strict=True) for chunk in turn]


def _parts(record: StagedRecord, unit: int, chunks: Sequence[tuple[int, int]]) -> Parts:
    """The virtual stages of a unit's layers, and which of its layers each has."""
    first, count = int(record.first[unit]), int(record.count[unit])
    found = []
    for virtual, (a, b) in enumerate(chunks):
        begin, end = max(a, first) - first, min(b, first + count) - first
        if begin < end:
            found.append((virtual, begin, end))
    return tuple(found)


def _chunk_of_layers(chunks: Sequence[tuple[int, int]]) -> dict[int, int]:
    return {layer: number for number, (a, b) in enumerate(chunks) for layer in range(a, b)}


def place_parts(assignment: Assignment, program: Program, pieces: Sequence[Piece]) -> list[Pass]:
    """The pass that each piece of a part's program belongs to.

    A forward operation runs no earlier than the operations it reads from; a backward one, no later. So values go from
    stage to stage in the order of the schedule.
    """
    numbers = {id(unit): number for number, unit in enumerate(program.operations)}
    made: dict[Key, Pass] = {}
    found: list[Pass] = []
    for one in pieces:
        number = numbers[id(one.unit)]
        read = [made[key] for key in one.ins if key in made]
        ahead = [v for work, v in read if work != BACKWARD]
        back = [v for work, v in read if work == BACKWARD]
        planned = assignment.unit[number]
        if assignment.is_forward[number] and not back:
            where = (FORWARD, max([planned, *ahead], default=0) if planned >= 0 or ahead else 0)
        else:
            known = planned if planned >= 0 else max(ahead, default=assignment.num_chunks - 1)
            where = (BACKWARD, min([known, *back]))
        found.append(where)
        made.update(dict.fromkeys(one.outs, where))
    return found
