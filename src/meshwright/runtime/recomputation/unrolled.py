"""Recomputation in a region that runs its layers one after the other.

What a layer computes again stands in a checkpoint before the first operation of its backward pass that reads any of it.
The gradient that the layer's backward pass begins with goes through the checkpoint, too: so nothing of it can run
earlier, when the layers after it still keep what they need. What is kept on the host is copied there where it is made,
and fetched before its first reader in the same way.
"""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.program.program import Operation, Program
from meshwright.runtime.recomputation.layers import Layers, is_heavy
from meshwright.runtime.recomputation.policies import Retained
from meshwright.runtime.recomputation.regions import host_copy, recomputation, replaced, slice_to

#: The values that a layer's checkpoint makes, the operations that it runs, the values that these read.
Slice = tuple[Sequence[int], list[Operation], set[int]]


def recompute_layers(program: Program, layers: Layers, retained: Retained) -> None:
    """Changes a program so that its backward pass computes again what is not kept.

    Args:
        program: The program.
        layers: Its layers.
        retained: The operations whose results are kept, and where.
    """
    there = _there(program, layers, retained.at_all)
    wanted = _wanted(program, layers, there)
    before: dict[int, list[int]] = {}  # by position the layers that are computed again there
    for layer, readers in wanted.items():
        before.setdefault(min(readers.values()), []).append(layer)
    again = _Again(program, layers)
    operations: list[Operation] = []
    for position, operation in enumerate(program.operations):
        if not layers.backward[position]:
            operations += [operation, *(again.copies(operation) if retained.on_host[position] else ())]
            continue
        slices: list[Slice] = []
        for layer in before.get(position, ()):
            inside = [program.operations[number] for number in np.flatnonzero(layers.layer == layer)]
            slices.append((sorted(wanted[layer]), *slice_to(program, inside, wanted[layer], there)))
        operations += again.fetched(operation, slices, position)
        for results, run, read in slices:
            arriving = _arriving(program, layers, results, position) if run else []
            operations += again.computed(run, read, results, arriving)
        operations.append(replaced(operation, again.new_values))
    program.operations[:] = operations


class _Again:
    """What the backward pass computes again or fetches from the host.

    Attributes:
        new_values: What stands for the values that were, for the operations that follow.
    """

    def __init__(self, program: Program, layers: Layers):
        self.program, self.layers = program, layers
        self.new_values: dict[int, int] = {}
        self._fetches: dict[int, Operation] = {}  # by the value that each fetches

    def copies(self, operation: Operation) -> list[Operation]:
        """Copies to the host of an operation's results; nothing reads those that the backward pass does not need."""
        found = []
        for value in operation.outputs:
            if getattr(self.program.types[value], "shape", ()):
                copy, self._fetches[value] = host_copy(self.program, value, operation)
                found.append(copy)
        return found

    def fetched(self, operation: Operation, slices: Sequence[Slice], position: int) -> list[Operation]:
        """Fetches what an operation and the recomputation before it read, where it was not fetched yet."""
        read = {*operation.inputs, *(value for _, _, own in slices for value in own)}
        values = sorted(self._fetches.keys() & read)
        if not values:
            return []
        fetches = [self._fetches.pop(value) for value in values]
        arriving = _arriving(self.program, self.layers, None, position)
        return self.computed(fetches, {one.inputs[0] for one in fetches}, values, arriving)

    def computed(
        self, run: Sequence[Operation], read: Collection[int], results: Sequence[int], arriving: Sequence[int]
    ) -> list[Operation]:
        """The checkpoint of some operations, which waits for what arrives; empty where it would wait for nothing."""
        if not arriving:
            return []
        arrived = {value: self.new_values.get(value, value) for value in arriving}
        inputs = [*sorted(read), *arrived.values()]
        made, new = recomputation(self.program, run, inputs, [*results, *arrived.values()], prevent_cse=True)
        made = replaced(made, {value: self.new_values[value] for value in self.new_values.keys() & read})
        self.new_values.update((value, new[value]) for value in results)
        self.new_values.update((value, new[through]) for value, through in arrived.items())
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


def _arriving(program: Program, layers: Layers, wanted: Sequence[int] | None, position: int) -> list[int]:
    """The gradients that the backward pass of a layer begins with, of those that are there at a position.

    Args:
        program: The program.
        layers: Its layers.
        wanted: The values of the layer that it reads; None for the operands of its first product.
        position: The position.
    """
    # By value the gradients that it is made of: those that are there, and what follows from them alone. A layer's
    # backward pass may change the gradient, to another type for example, before it reads anything of the layer.
    made_of = {
        value: {value}
        for number in np.flatnonzero(layers.backward[:position]).tolist()
        for value in program.operations[number].outputs
    }
    follows = set(wanted or ())
    for number in np.flatnonzero(layers.backward[position:]).tolist():
        operation = program.operations[position + number]
        arriving = {gradient for value in operation.inputs for gradient in made_of.get(value, ())}
        if is_heavy(operation) if wanted is None else not follows.isdisjoint(operation.inputs):
            if arriving:
                return sorted(arriving)
            follows.update(operation.outputs)
        elif arriving:
            made_of.update(dict.fromkeys(operation.outputs, arriving))
    return []
