"""How the values of a stage's update are split: each as the state that it is computed from or becomes.

Two parameters of one shape may be split differently, and a gradient may be transposed before the optimizer reads it. So
a sharding is never looked up by shape: it is carried from the state along the operations of the update, dim by dim.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from meshwright.graph.tracing.flatten import signature_of
from meshwright.plans.tensor import Spec
from meshwright.program.program import Operation
from meshwright.rules import LoopNest, loop_nest
from meshwright.rules.base import Dims
from meshwright.runtime.stages.cutting.stage_programs import StagePrograms
from meshwright.runtime.stages.lowering.layout import is_spread

_Neighbour = tuple[Dims, int, Dims, LoopNest]  # dims of a value, another value, its dims, the operation of both


def specs_of_update(
    programs: StagePrograms, stage: int, leaves: Mapping[int, Spec], sizes: Mapping[str, int]
) -> dict[int, Spec]:
    """The shardings of the values of a stage's update, given those of its leaves; see `update_specs`.

    State that is split over the replicas comes first, so that each replica adds up its own part of a gradient.
    """
    program, after = programs.steps[stage].program, programs.assignment.state
    own = [update for (at, _), update in sorted(programs.updates.items()) if at == stage]
    units = {id(piece.unit): piece.unit for update in own for piece in update.pieces}
    state = {leaf: spec for leaf, spec in leaves.items() if any(spec)}
    results = ((value, after.get(place, -1)) for place, value in enumerate(program.outputs))
    state |= {value: state[leaf] for value, leaf in results if leaf in state}
    spread = {value: spec for value, spec in state.items() if is_spread(spec)}
    return update_specs(units.values(), program.types, (spread, state), sizes)


def update_specs(
    units: Iterable[Operation], types: Sequence[Any], state: Sequence[Mapping[int, Spec]], sizes: Mapping[str, int]
) -> dict[int, Spec]:
    """The sharding of each value that is connected with state by operations that keep the number of its elements.

    Args:
        units: The operations of the update.
        types: The type of each value.
        state: Shardings of state, by value; those of an earlier mapping are carried before those of a later one.
        sizes: The sizes of the mesh's axes.
    """
    neighbours = _neighbours(units, types)
    found: dict[int, Spec] = {}
    for known in state:
        queue = deque(value for value in known if value not in found)
        found.update((value, known[value]) for value in queue)
        while queue:  # breadth first, so that a value is split as the nearest state is
            value = queue.popleft()
            for dims, other, other_dims, nest in neighbours.get(value, ()):
                if other not in found:
                    spec = _carried(found[value], dims, other_dims, nest, sizes)
                    if spec is not None:
                        found[other] = spec
                        queue.append(other)
    return found


def _neighbours(units: Iterable[Operation], types: Sequence[Any]) -> dict[int, list[_Neighbour]]:
    """For each value, the others of equally many elements that operations connect it with."""
    found: dict[int, list[_Neighbour]] = defaultdict(list)
    for unit in units:
        if unit.regions:
            continue
        nest = loop_nest(signature_of(unit.equation))
        ends = [*zip(unit.inputs, nest.operands, strict=True), *zip(unit.outputs, nest.results, strict=True)]
        for value, dims in ends:
            for other, other_dims in ends:
                if other != value and 1 < _size(types[value]) == _size(types[other]):
                    found[value].append((dims, other, other_dims, nest))
    return found


def _size(kind: Any) -> int:
    return prod(getattr(kind, "shape", ()))


def _carried(spec: Spec, dims: Dims, other: Dims, nest: LoopNest, sizes: Mapping[str, int]) -> Spec | None:
    """The sharding of another value of an operation that splits the same loops; None if none does."""
    held: dict[int, tuple[str, ...]] = {}
    for axes, loops in zip(spec, dims, strict=True):
        if axes and (not loops or nest.loops[loops[0]].size % prod(sizes[axis] for axis in axes)):
            return None
        if axes:
            held[loops[0]] = axes
    found = tuple(held.pop(loops[0], ()) if loops else () for loops in other)
    return None if held else found
