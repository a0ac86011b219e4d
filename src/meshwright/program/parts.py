"""Takes a part out of a program as a program of its own, and puts what a function computes into one."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from meshwright import jax_compat
from meshwright.program.program import UNPLANNED, Operation, Program


class Moving:
    """Moves operations of one program into another, whose values have other numbers; constants come along.

    Args:
        source: The program that they are of.
        target: The program that gets their values.
        numbers: The numbers in the target of values of the source that are there; those that are moved are added.
    """

    def __init__(self, source: Program, target: Program, numbers: dict[int, int]):
        self.source, self.target, self.numbers = source, target, numbers

    def number(self, value: int) -> int:
        """The number in the target of a value of the source; single numbers have one for each reader, as in jaxprs."""
        if value in self.numbers:
            return self.numbers[value]
        constant, kind = self.source.constants[value], self.source.types[value]
        number = self.target.add_constant(constant, kind)
        if not jax_compat.is_literal(constant, kind):
            self.numbers[value] = number
        return number

    def operation(self, operation: Operation) -> Operation:
        """An operation of the source as one of the target."""
        inputs = tuple(map(self.number, operation.inputs))
        outputs = tuple(self.target.add_value(self.source.types[value]) for value in operation.outputs)
        self.numbers.update(zip(operation.outputs, outputs, strict=True))
        return operation._replace(inputs=inputs, outputs=outputs)


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
    moving = Moving(program, part, dict(zip(inputs, part.inputs, strict=True)))
    part.operations.extend(map(moving.operation, operations))
    part.outputs.extend(map(moving.number, outputs))
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
    moving = Moving(part, program, dict(zip(part.inputs, operands, strict=True)))
    operations = list(map(moving.operation, folded(part, part.operations)))
    return operations, list(map(moving.number, part.outputs))


def folded(program: Program, operations: Iterable[Operation]) -> list[Operation]:
    """Operations but those that convert one known number, as JAX leaves them out; what they make becomes a constant."""
    return [operation for operation in operations if not _is_folded(program, operation)]


def _is_folded(program: Program, operation: Operation) -> bool:
    value = operation.inputs[0] if operation.name == "convert_element_type" else -1
    if value not in program.constants or not jax_compat.is_literal(program.constants[value], program.types[value]):
        return False
    (made,) = operation.outputs
    with np.errstate(all="ignore"):
        program.constants[made] = np.asarray(program.constants[value]).astype(program.types[made].dtype)[()]
    return True
