"""A step cut into stages of consecutive layers, each for devices of its own.

The step is traced whole, and its operations are dealt to stages by the layers whose parameters and cache they read.
Between two layers it is cut where the fewest bytes are alive. What depends on the packed numbers of a step alone, such
as positions and masks, is computed by every stage that reads it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path

from meshwright.errors import ServingError
from meshwright.program.program import Operation, Program
from meshwright.zoo.layers import Array, PyTree


@dataclass(frozen=True)
class StagePart:
    """What one stage computes of a step.

    Attributes:
        params: Which leaves of the parameters it reads.
        sends: How many values it passes on; of the last stage, the scores.
        run: Its function: its parameters, the cache of its layers, and then what it receives, which for the first stage
            is the last tokens and the packed numbers, and for others these numbers and what is sent to them. Returns
            its cache and what it sends.
    """

    params: tuple[int, ...]
    sends: int
    run: Callable[..., tuple[Any, ...]]


def even_bounds(layers: int, stages: int) -> tuple[int, ...]:
    """The first layer of each stage, and the number of layers.

    >>> even_bounds(32, 4), even_bounds(5, 2)
    ((0, 8, 16, 24, 32), (0, 2, 5))
    """
    return tuple(layers * stage // stages for stage in range(stages + 1))


def cut(
    step: Callable[..., Any], params: PyTree, arrays: PyTree, last: Any, packed: Any, bounds: Sequence[int]
) -> list[StagePart]:
    """The parts of a step.

    Args:
        step: What `Decoder.step` computes for one shape.
        params: The types of its parameters.
        arrays: Of the cache, a list with one entry for each layer.
        last: Of the last tokens.
        packed: Of the packed numbers.
        bounds: What `even_bounds` returns.
    """
    program = Program.of(jax.make_jaxpr(step)(params, arrays, last, packed))
    layer_of_param = [layer_of(path) for path, _ in tree_flatten_with_path(params)[0]]
    layer_of_array = [path[0].idx for path, _ in tree_flatten_with_path(arrays)[0]]
    layers: dict[int, int | None] = dict(zip(program.inputs, [*layer_of_param, *layer_of_array], strict=False))
    num_params, num_arrays = len(layer_of_param), len(layer_of_array)
    tokens, numbers = program.inputs[-2:]
    dependent, own = {*layers, tokens}, []  # the positions of operations that belong to one stage
    for position, operation in enumerate(program.operations):
        if not dependent.isdisjoint(operation.inputs):
            dependent.update(operation.outputs)
            own.append(position)
    crossings, cuts = [], [0]
    for bound in bounds[1:-1]:
        place, alive = _best_cut(program, own, layers, bound, num_arrays)
        cuts.append(place)
        crossings.append(alive)
    cuts.append(len(program.operations))
    received = [[tokens, numbers], *([numbers, *alive] for alive in crossings)]
    sent = [*crossings, program.outputs[num_arrays:]]
    dealt, parts = set(own), []
    for stage, (first, end) in enumerate(pairwise(cuts)):
        operations = [
            operation
            for position, operation in enumerate(program.operations)
            if position not in dealt or first <= position < end
        ]
        read = {value for operation in operations for value in operation.inputs}
        leaves = [number for number in range(num_params) if program.inputs[number] in read]
        held = [n for n in range(num_arrays) if bounds[stage] <= layer_of_array[n] < bounds[stage + 1]]
        tree = jax.tree.structure(arrays[bounds[stage] : bounds[stage + 1]])
        inputs = [
            *(program.inputs[number] for number in leaves),
            *(program.inputs[num_params + number] for number in held),
            *received[stage],
        ]
        kept = [program.outputs[number] for number in held]
        run = _runner(program, operations, inputs, kept, sent[stage], tree)
        parts.append(StagePart(tuple(leaves), len(sent[stage]), run))
    return parts


def _runner(
    program: Program, operations: Sequence[Operation], inputs: Sequence[int], kept: Sequence[int], sent: Any, tree: Any
) -> Callable[..., tuple[Any, ...]]:
    def run(params: Sequence[Array], arrays: PyTree, *received: Array) -> tuple[Any, ...]:
        given = [*params, *jax.tree.leaves(arrays), *received]
        values = program.constants | dict(zip(inputs, given, strict=True))
        program.run_some(operations, values)
        return jax.tree.unflatten(tree, [values[number] for number in kept]), *(values[number] for number in sent)

    return run


def layer_of(path: Sequence[Any]) -> int | None:
    """The layer of a parameter; None for those around the layers."""
    return path[1].idx if getattr(path[0], "key", None) == "layers" else None


def _best_cut(
    program: Program, own: Sequence[int], layer_at: dict[int, int | None], bound: int, num_arrays: int
) -> tuple[int, list[int]]:
    """Before which operation to cut in front of a layer, and which values are alive there."""
    before, after = 0, len(program.operations)
    last_read, made = {}, {}
    for position in own:
        operation = program.operations[position]
        layers = [layer for value in operation.inputs if (layer := layer_at.get(value)) is not None]
        if any(layer < bound for layer in layers):
            before = position + 1
        if any(layer >= bound for layer in layers):
            after = min(after, position)
        last_read.update(dict.fromkeys(operation.inputs, position))
        made.update(dict.fromkeys(operation.outputs, position))
    last_read.update(dict.fromkeys(program.outputs[num_arrays:], len(program.operations)))
    if before > after:
        raise ServingError("the layers of this model depend on one another out of order; serve it without stages")
    best: tuple[int, list[int]] | None = None
    fewest = 0
    for place in range(before, after + 1):
        alive = sorted(value for value, at in made.items() if at < place <= last_read.get(value, -1))
        size = sum(program.types[value].size * program.types[value].dtype.itemsize for value in alive)
        if best is None or size < fewest:
            best, fewest = (place, alive), size
    assert best is not None
    return best
