"""The layers of a region of a step: which operations of its forward pass are computed again together, and when.

Layers are the laps of a sequence of operations that repeats. A lap begins where the forward pass hands on the fewest
bytes, which is between layers; what it hands on there is kept. Operations outside of laps, such as the embedding and
the loss, run once, beside everything that the layers keep, so to compute them again would save nothing at the peak.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshwright import jax_compat
from meshwright.graph.phases import BACKWARD, FORWARD, PHASES, assign_phases
from meshwright.graph.repeats import RepeatedRun, find_runs
from meshwright.program.program import Operation, Program
from meshwright.rules.registry import builtin_rules

OUTSIDE = -1  # the layer of operations that are in none
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


@dataclass(frozen=True)
class Layers:
    """The layers of a region.

    Attributes:
        forward: For each operation whether it is of the forward pass.
        backward: The same of the backward pass.
        layer: The layer of each operation of the forward pass; `OUTSIDE` for others.
        kind: The kind of each layer: layers of one kind repeat one another.
        place: The place of each operation in its layer; a lap that is cut off has those of a whole one.
        hands_on: Whether another layer reads results of each operation; in a loop, whether the next trip does.
    """

    forward: NDArray[np.bool_]
    backward: NDArray[np.bool_]
    layer: NDArray[np.int64]
    kind: list[int]
    place: NDArray[np.int64]
    hands_on: NDArray[np.bool_]

    @property
    def num_kinds(self) -> int:
        return max(self.kind, default=-1) + 1

    def of_kind(self, kind: int) -> list[int]:
        """The layers of a kind, in order."""
        return [number for number, own in enumerate(self.kind) if own == kind]


def phases_of(program: Program) -> NDArray[np.int64]:
    """The phase of each operation of a region, as its number among `PHASES`."""
    scopes: dict[str, int] = {}
    maker: dict[int, int] = {}
    makers: list[int] = []
    start = [0]
    for number, operation in enumerate(program.operations):
        makers += [maker.get(value, -1) for value in operation.inputs]
        start.append(len(makers))
        maker.update(dict.fromkeys(operation.outputs, number))
    scope = [scopes.setdefault(operation.scope, len(scopes)) for operation in program.operations]
    return assign_phases(np.array(scope, np.int64), list(scopes), np.array(makers, np.int64), np.array(start, np.int64))


def layers_of(program: Program) -> Layers:
    """The layers of a region whose layers are not in a loop."""
    phase = phases_of(program)
    forward, backward = phase == PHASES.index(FORWARD), phase == PHASES.index(BACKWARD)
    layer, place = np.full(len(phase), OUTSIDE), np.zeros(len(phase), np.int64)
    ahead, kind = np.flatnonzero(forward), list[int]()
    operations = [program.operations[number] for number in ahead]
    heavy = np.array([is_heavy(operation) for operation in operations], bool)
    tokens: dict[tuple[str, tuple[object, ...]], int] = {}
    names = [(one.name, tuple(v.aval for v in one.equation.outvars)) for one in operations]
    runs = find_runs([tokens.setdefault(name, len(tokens)) for name in names])
    crossing = _crossing(program, operations)
    for number, run in enumerate(run for run in runs if heavy[run.start : run.start + run.period].any()):
        laps = _laps(run, crossing)
        for first, stop in laps:
            layer[ahead[first:stop]] = len(kind)
            place[ahead[first:stop]] = np.arange(first - laps[1][0], stop - laps[1][0]) % run.period
            kind.append(number)
    return Layers(forward, backward, layer, kind, place, _hands_on(program, layer))


def one_layer(program: Program, num_forward: int, carried: Collection[int]) -> Layers:
    """The layers of a region that has a forward pass of one layer, so many operations, and its backward pass.

    Args:
        program: The region.
        num_forward: The number of operations of the forward pass.
        carried: The values that it hands on.
    """
    forward = np.arange(len(program.operations)) < num_forward
    hands_on = np.array([not set(carried).isdisjoint(one.outputs) for one in program.operations], bool)
    return Layers(forward, ~forward, np.where(forward, 0, OUTSIDE), [0], np.arange(len(forward)), forward & hands_on)


def is_heavy(operation: Operation) -> bool:
    """Whether an operation is a product, or a kernel or a loop that may have products in it."""
    return operation.name in _PRODUCTS or bool(operation.regions) or operation.name not in builtin_rules()


def num_bytes(aval: object) -> int:
    """The bytes of a value of some type; 0 for a token."""
    dtype, shape = getattr(aval, "dtype", None), getattr(aval, "shape", ())
    return 0 if dtype is None else prod(shape) * jax_compat.itemsize(dtype)


def _hands_on(program: Program, layer: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The operations whose results another layer reads."""
    maker = {value: n for n, one in enumerate(program.operations) if layer[n] != OUTSIDE for value in one.outputs}
    found = np.zeros(len(layer), bool)
    for number in np.flatnonzero(layer != OUTSIDE).tolist():
        read = (maker[value] for value in program.operations[number].inputs if value in maker)
        found[[n for n in read if layer[n] != layer[number]]] = True
    return found


def _crossing(program: Program, operations: Sequence[Operation]) -> NDArray[np.int64]:
    """The bytes that the forward pass hands on from before each of its operations to it and those after it."""
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, operation in enumerate(operations):
        last.update((value, number) for value in operation.inputs if value in made)
        made.update(dict.fromkeys(operation.outputs, number))
    change = np.zeros(len(operations) + 1, np.int64)
    for value, number in last.items():
        size = num_bytes(program.types[value])
        change[made[value] + 1] += size
        change[number + 1] -= size
    return np.cumsum(change)


def _laps(run: RepeatedRun, crossing: NDArray[np.int64]) -> list[tuple[int, int]]:
    """The ranges of a run's laps; the first and the last may be shorter."""
    starts = [range(run.start + offset, run.stop, run.period) for offset in range(run.period)]
    handed_on = [float(np.mean(crossing[[first for first in laps if first > run.start]])) for laps in starts]
    bounds = sorted({run.start, *starts[int(np.argmin(handed_on))], run.stop})
    return list(pairwise(bounds))
