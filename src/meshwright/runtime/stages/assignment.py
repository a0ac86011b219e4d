"""Assigns the operations and arguments of a traced step to the virtual stages of a plan.

The plan's record has the layers of every operation of the graph. Here they are found for the units of the step that is
cut into microbatches, which the tracer numbers in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from meshwright.errors import ShardingError
from meshwright.graph import Graph
from meshwright.graph.phases import FORWARD, PHASES
from meshwright.plans.plan import PlanData
from meshwright.runtime.microbatches.part_program import Instruction, Key
from meshwright.runtime.microbatches.units import Unit, Units
from meshwright.runtime.program.serials import count
from meshwright.schedules.base import BACKWARD

Pass = tuple[str, int]  # forward or backward, and a virtual stage


@dataclass(frozen=True)
class Assignment:
    """Where a step's units and arguments belong.

    Attributes:
        num_stages: How many stages there are; virtual stage ``v`` is a chunk of stage ``v % num_stages``.
        num_chunks: How many virtual stages there are.
        serial: For each unit, the number of its first operation in the traced program.
        layer: For each unit, its layer; -1 where the plan knows none.
        unit: For each unit, the virtual stage of that layer, or -1.
        is_forward: For each unit, whether it belongs to the forward pass.
        argument: For each argument's leaf, the stage that owns it.
    """

    num_stages: int
    num_chunks: int
    serial: Sequence[int]
    layer: Sequence[int]
    unit: Sequence[int]
    is_forward: Sequence[bool]
    argument: Sequence[int]


def assign(plan: PlanData, graph: Graph, program: Units) -> Assignment:
    """The assignment that a plan makes.

    Raises:
        ShardingError: The plan is for another function, or a unit spans several virtual stages.
    """
    record = plan.staged_record
    columns = graph.columns
    if len(record.unit) != len(columns.signature) or len(record.argument_unit) != len(graph.inputs):
        raise ShardingError(
            f"the plan was made for a program of {len(record.unit)} operations and {len(record.argument_unit)} "
            f"arguments, and this one has {len(columns.signature)} and {len(graph.inputs)}: make the plan again"
        )
    chunks = [chunk for turn in zip(*(stage.chunks for stage in plan.stages), strict=True) for chunk in turn]
    layer_of = _chunk_of_layers(chunks)
    counts = [count(unit.eqn) for unit in program.units]
    starts = [0, *accumulate(counts)]
    place = {int(serial): i for i, serial in enumerate(columns.serial)}
    layers, forward = [], []
    for number, unit in enumerate(program.units):
        ops = [place[s] for s in range(starts[number], starts[number + 1]) if s in place]
        layers.append(_layer(unit, record.unit[ops], record.first, record.count, layer_of))
        forward.append(all(columns.phase[i] == PHASES.index(FORWARD) for i in ops))
    virtual = [layer_of.get(layer, -1) for layer in layers]
    owners = [layer_of[int(record.first[unit])] % len(plan.stages) for unit in record.argument_unit]
    return Assignment(len(plan.stages), len(chunks), starts[:-1], layers, virtual, forward, owners)


def _chunk_of_layers(chunks: Sequence[tuple[int, int]]) -> dict[int, int]:
    return {layer: number for number, (a, b) in enumerate(chunks) for layer in range(a, b)}


def _layer(unit: Unit, members: np.ndarray, first: np.ndarray, counts: np.ndarray, layer_of: dict[int, int]) -> int:
    """The layer of most of a unit's operations, given their numbers in the plan's record."""
    for member in np.unique(members):
        begin = int(first[member])
        if layer_of[begin] != layer_of[begin + int(counts[member]) - 1]:
            raise ShardingError(f"{unit} loops over layers of several stages: unroll it, or give every stage all of it")
    found = first[members].tolist()
    return max(set(found), key=found.count) if found else -1


def place_parts(assignment: Assignment, program: Units, instructions: Sequence[Instruction]) -> list[Pass]:
    """The pass that each instruction of a part's program belongs to.

    A forward operation runs no earlier than the operations it reads from; a backward one, no later. So values go from
    stage to stage in the order of the schedule.
    """
    numbers = {id(unit): number for number, unit in enumerate(program.units)}
    made: dict[Key, Pass] = {}
    found: list[Pass] = []
    for one in instructions:
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
