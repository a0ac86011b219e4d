"""Takes a part out of a program as a program of its own, and puts what a function computes into one."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from meshwright.program.program import UNPLANNED, Operation, Program


def part_of(
    program: Program, inputs: Sequence[int], operations: Iterable[Operation], outputs: Sequence[int]
) -> Program:
    """A program of some operations, whose values are numbered anew.

    Args:
        program: The program that they are of.
        inputs: The values that it is given, in order.
        operations: The operations, in order; those on which no result depends are left out.
        outputs: The values that it returns.
    """
    part = Program([program.types[value] for value in inputs], range(len(inputs)))
    numbers = dict(zip(inputs, part.inputs, strict=True))

    def number(value: int) -> int:
        if value not in numbers:
            numbers[value] = part.add_constant(program.constants[value], program.types[value])
        return numbers[value]

    for operation in operations:
        read = tuple(map(number, operation.inputs))
        numbers.update((value, part.add_value(program.types[value])) for value in operation.outputs)
        part.operations.append(operation._replace(inputs=read, outputs=tuple(map(number, operation.outputs))))
    part.outputs.extend(map(number, outputs))
    live = part.live
    part.operations[:] = [operation for place, operation in enumerate(part.operations) if place in live]
    return part


def added(program: Program, function: Callable[..., Any], operands: Sequence[int]) -> tuple[list[Operation], list[int]]:
    """The operations of what a function computes of some values of a program, and the numbers of its results.

    Args:
        program: The program, which gets new values; the operations are its caller's to put into it.
        function: Returns a list of arrays.
        operands: The values that it is given.
    """
    types = [program.types[value] for value in operands]
    like = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=getattr(t, "weak_type", False)) for t in types]
    part = Program.of(jax.make_jaxpr(function)(*like), UNPLANNED)
    numbers = dict(zip(part.inputs, operands, strict=True))
    for number, value in part.constants.items():
        numbers[number] = program.add_constant(value, part.types[number])
    operations = []
    for operation in part.operations:
        numbers.update((value, program.add_value(part.types[value])) for value in operation.outputs)
        read, made = (tuple(numbers[v] for v in side) for side in (operation.inputs, operation.outputs))
        operations.append(operation._replace(inputs=read, outputs=made))
    return operations, [numbers[value] for value in part.outputs]
