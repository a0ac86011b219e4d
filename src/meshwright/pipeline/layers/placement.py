"""Assigns every operation and argument to a unit: backward and update work follow the forward pass.

A backward operation reads cotangents, which come from later layers, and residuals of the forward pass. It belongs to
the latest unit that is no later than any of its cotangents' units and at which every residual is available: a unit that
computes or reads it. (The earliest unit of all operands would put a weight's gradient where its input was made, a layer
too early.) A parameter's update belongs to the unit of the parameter; other update work belongs to the unit of its
largest operand. Values that depend on neither data nor parameters can be computed anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from meshwright.arrays import Ints
from meshwright.graph.phases import BACKWARD, FORWARD, PHASES, UPDATE
from meshwright.pipeline.layers.forward_pass import Flow

Homes = dict[int, set[int]]


@dataclass(frozen=True)
class Places:
    """The unit of each operation, and for each argument the units that use it; the first one owns it."""

    unit: Ints
    arguments: dict[int, tuple[int, ...]]


def follow(flow: Flow, unit: Ints, num_units: int) -> Places:
    """Assigns all units, given units by position; forward operations on data keep theirs."""
    columns = flow.graph.columns
    unit = unit.copy()
    start, reads = columns.start.tolist(), columns.reads.tolist()
    operands = [reads[a:b] for a, b in pairwise(start)]
    phase = columns.phase
    by_phase = [np.flatnonzero(phase == PHASES.index(name)).tolist() for name in (FORWARD, BACKWARD, UPDATE)]
    _pull_weights(flow, unit, by_phase[0], operands)
    homes = _homes(flow, unit, by_phase[0], operands)
    _backward(flow, unit, by_phase[1], operands, homes, num_units)
    _update(flow, unit, by_phase[2], operands, homes)
    arguments = _arguments(flow, unit, by_phase, operands)
    return Places(unit, arguments)


def _pull_weights(flow: Flow, unit: Ints, forward: Sequence[int], operands: list[list[int]]) -> None:
    """Moves work on parameters alone (such as a cast before a loop) to the unit that first reads its result."""
    columns = flow.graph.columns
    earliest: dict[int, int] = {}
    for i in reversed(forward):
        first = int(columns.first_made[i])
        made = range(first, first + int(columns.num_made[i]))
        if not flow.from_data[first]:
            unit[i] = min((earliest[v] for v in made if v in earliest), default=unit[i])
        for v in operands[i]:
            earliest[v] = min(int(unit[i]), earliest.get(v, int(unit[i])))


def _homes(flow: Flow, unit: Ints, forward: Sequence[int], operands: list[list[int]]) -> Homes:
    """For each value of the forward pass that depends on an argument, the units that compute or read it."""
    matters = flow.reached((*flow.roles.data, *flow.roles.parameters))
    found: Homes = {}
    for i in forward:
        here = int(unit[i])
        for v in operands[i]:
            if matters[v]:
                found.setdefault(v, set()).add(here)
        first = int(flow.graph.columns.first_made[i])
        for v in range(first, first + int(flow.graph.columns.num_made[i])):
            if matters[v]:
                found.setdefault(v, set()).add(here)
    return {v: units for v, units in found.items() if flow.graph.sizes[v] > 1}


def _wishes(flow: Flow, update: Sequence[int], operands: list[list[int]], homes: Homes) -> dict[int, int]:
    """For each tensor of the update that a parameter's next value is made of, the parameter's unit; of several, one."""
    graph, found = flow.graph, dict[int, int]()
    for place, argument in graph.state.items():
        if (parameter := graph.inputs[argument]) in homes:
            found.setdefault(graph.outputs[place], min(homes[parameter]))
    for i in reversed(update):
        wish = found.get(int(graph.columns.first_made[i]))
        if wish is not None:
            found |= {v: wish for v in operands[i] if graph.sizes[v] > 1 and v not in found}
    return found


def _backward(
    flow: Flow, unit: Ints, backward: Sequence[int], operands: list[list[int]], homes: Homes, num_units: int
) -> None:
    columns = flow.graph.columns
    made_in: dict[int, int] = {}
    for i in backward:
        latest = min((made_in[v] for v in operands[i] if v in made_in), default=num_units - 1)
        residuals = [homes[v] for v in operands[i] if v in homes]
        common = set.intersection(*residuals) if residuals else set()
        shared = [u for u in common or set().union(*residuals) if u <= latest]
        unit[i] = max(shared, default=latest)
        first = int(columns.first_made[i])
        if residuals or any(v in made_in for v in operands[i]):
            made_in |= dict.fromkeys(range(first, first + int(columns.num_made[i])), int(unit[i]))
    for start, stop in flow.graph.loops:  # a loop is cut with the loop it goes back through
        if (columns.phase[start:stop] == PHASES.index(BACKWARD)).all():
            unit[start:stop] = np.bincount(unit[start:stop], flow.flops[start:stop] + 1e-9).argmax()


def _update(flow: Flow, unit: Ints, update: Sequence[int], operands: list[list[int]], homes: Homes) -> None:
    columns, sizes, wishes = flow.graph.columns, flow.graph.sizes, _wishes(flow, update, operands, homes)
    where = {v: min(homes[v]) for v in flow.roles.parameters if v in homes}
    for i in update:
        known = [v for v in operands[i] if _unit_of(v, where, columns.producer, unit) >= 0 and sizes[v] > 1]
        first = int(columns.first_made[i])
        if not known:
            unit[i] = -1
            continue
        largest = _unit_of(max(known, key=lambda v: sizes[v]), where, columns.producer, unit)
        unit[i] = wishes.get(first, largest)
        where |= dict.fromkeys(range(first, first + int(columns.num_made[i])), int(unit[i]))
    readers: dict[int, int] = {}
    for i in reversed(update):
        first = int(columns.first_made[i])
        if unit[i] < 0:
            made = range(first, first + int(columns.num_made[i]))
            unit[i] = next((readers[v] for v in made if v in readers), 0)
        for v in operands[i]:
            readers[v] = int(unit[i])


def _unit_of(value: int, where: dict[int, int], producer: Ints, unit: Ints) -> int:
    if value in where:
        return where[value]
    index = int(producer[value])
    return int(unit[index]) if index >= 0 else -1


def _arguments(
    flow: Flow, unit: Ints, by_phase: list[list[int]], operands: list[list[int]]
) -> dict[int, tuple[int, ...]]:
    """Units that use each argument: in the forward pass or, if only the update reads it, in the update."""
    inputs = set(flow.graph.inputs)
    found: dict[int, tuple[int, ...]] = {}
    for ops in (by_phase[0], by_phase[2]):
        users: dict[int, set[int]] = {}
        for i in ops:
            for v in operands[i]:
                if v in inputs and v not in found:
                    users.setdefault(v, set()).add(int(unit[i]))
        found |= {v: tuple(sorted(units)) for v, units in users.items()}
    return {v: found.get(v, (0,)) for v in flow.graph.inputs}
