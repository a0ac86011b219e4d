"""Recomputation in a region that runs its layers one after the other.

What a layer computes again stands in a checkpoint before the first operation of its backward pass that reads any of it.
The gradient that the layer's backward pass begins with goes through the checkpoint, too: so nothing of it can run
earlier, when the layers after it still keep what they need.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.program.program import Operation, Program
from meshwright.runtime.recomputation.layers import Layers
from meshwright.runtime.recomputation.regions import recomputation, replaced, slice_to


def recompute_layers(program: Program, layers: Layers, kept: NDArray[np.bool_]) -> None:
    """Changes a program so that its backward pass computes again what is not kept.

    Args:
        program: The program.
        layers: Its layers.
        kept: The operations whose results are kept.
    """
    there = _there(program, layers, kept)
    wanted = _wanted(program, layers, there)
    before: dict[int, list[int]] = {}  # by position the layers that are computed again there
    for layer, readers in wanted.items():
        before.setdefault(min(readers.values()), []).append(layer)
    new_values: dict[int, int] = {}
    operations: list[Operation] = []
    for position, operation in enumerate(program.operations):
        for layer in before.get(position, ()):
            operations += _layer(program, layers, layer, sorted(wanted[layer]), there, position, new_values)
        operations.append(replaced(operation, new_values) if layers.backward[position] else operation)
    program.operations[:] = operations


def _layer(
    program: Program,
    layers: Layers,
    layer: int,
    wanted: Sequence[int],
    there: set[int],
    position: int,
    new_values: dict[int, int],
) -> list[Operation]:
    """The checkpoint of a layer; empty where nothing would keep it from running at once."""
    inside = [program.operations[number] for number in np.flatnonzero(layers.layer == layer)]
    again, read = slice_to(program, inside, wanted, there)
    arriving = _arriving(program, layers, wanted, position)
    if not (again and arriving):
        return []
    arrived = {value: new_values.get(value, value) for value in arriving}
    outputs = [*wanted, *arrived.values()]
    made, new = recomputation(program, again, [*sorted(read), *arrived.values()], outputs, prevent_cse=True)
    new_values.update((value, new[value]) for value in wanted)
    new_values.update((value, new[through]) for value, through in arrived.items())
    return [made]


def _there(program: Program, layers: Layers, kept: NDArray[np.bool_]) -> set[int]:
    """The values that need not be computed again: kept, or read by other layers or after the backward pass."""
    layer_of: dict[int, int] = {}
    for number, operation in enumerate(program.operations):
        if not kept[number]:
            layer_of.update(dict.fromkeys(operation.outputs, int(layers.layer[number])))
    read_elsewhere = set(program.outputs)
    for number, operation in enumerate(program.operations):
        if not layers.backward[number]:
            here = layers.layer[number]
            read_elsewhere.update(value for value in operation.inputs if layer_of.get(value, here) != here)
    return set(range(len(program.types))) - (layer_of.keys() - read_elsewhere)


def _wanted(program: Program, layers: Layers, there: set[int]) -> dict[int, dict[int, int]]:
    """By layer the values that are not there and that the backward pass reads, each with its first reader."""
    layer_of: dict[int, int] = {}
    wanted: dict[int, dict[int, int]] = {}
    for number, operation in enumerate(program.operations):
        if not layers.backward[number]:
            layer_of.update((value, int(layers.layer[number])) for value in operation.outputs if value not in there)
            continue
        for value in operation.inputs:
            if value in layer_of:
                wanted.setdefault(layer_of[value], {}).setdefault(value, number)
    return wanted


def _arriving(program: Program, layers: Layers, wanted: Sequence[int], position: int) -> list[int]:
    """The gradients that the backward pass of a layer begins with, of those that are there at a position."""
    made = {
        value
        for number in np.flatnonzero(layers.backward[:position]).tolist()
        for value in program.operations[number].outputs
    }
    follows = set(wanted)
    for number in np.flatnonzero(layers.backward[position:]).tolist():
        operation = program.operations[position + number]
        if not follows.isdisjoint(operation.inputs):
            arriving = sorted(made.intersection(operation.inputs))
            if arriving:
                return arriving
            follows.update(operation.outputs)
    return []
