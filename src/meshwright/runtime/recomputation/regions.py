"""Parts of a program as programs, and the operations that run them: what a checkpoint computes, what a loop repeats."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from meshwright import jax_compat
from meshwright.program.as_jaxpr import as_jaxpr
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


def slice_to(
    program: Program, operations: Sequence[Operation], wanted: Iterable[int], there: Collection[int]
) -> tuple[list[Operation], set[int]]:
    """The operations that must run to compute some values, in order, and the values that they read.

    Args:
        program: The program that they are of.
        operations: Those that may run.
        wanted: The values.
        there: The values that are there and need not be computed.
    """
    missing, chosen, read = set(wanted), [], set[int]()
    for operation in reversed(operations):
        if missing.isdisjoint(operation.outputs):
            continue
        chosen.append(operation)
        own = {value for value in operation.inputs if not _is_literal(program, value)}
        read |= own
        missing.update(value for value in own if value not in there)
    computed = {value for operation in chosen for value in operation.outputs}
    return chosen[::-1], {value for value in read if value in there or value not in computed}


def recomputation(
    program: Program, operations: Sequence[Operation], inputs: Sequence[int], outputs: Sequence[int], prevent_cse: bool
) -> tuple[Operation, dict[int, int]]:
    """An operation of the backward pass that computes something again.

    Args:
        program: The program, which gets new values.
        operations: What it runs.
        inputs: The values that it is given; a result may be one of them, which then waits for all others.
        outputs: The values of which it makes new ones.
        prevent_cse: Whether the compiler must be kept from merging it with the forward pass.

    Returns:
        The operation, and the new value of each result.
    """
    again = [one._replace(equation=jax_compat.as_recomputed(one.equation, one.stack), calls=()) for one in operations]
    part = part_of(program, inputs, again, outputs)
    new = {value: program.add_value(program.types[value]) for value in outputs}
    equation = jax_compat.recomputing(lambda like: as_jaxpr(part, like), operations[0].equation, prevent_cse)
    return Operation(UNPLANNED, equation, tuple(inputs), tuple(new.values())), new


def host_copy(program: Program, value: int, after: Operation) -> tuple[Operation, Operation]:
    """The operation that copies a value to the host's memory, and the one that copies it back from there.

    Args:
        program: The program, which gets a new value.
        value: The value.
        after: The operation that makes it, or that stands where the copy is to stand.
    """
    to, back = jax_compat.host_copies(program.types[value], after.equation)
    copy = program.add_value(to.outvars[0].aval)
    return (
        Operation(UNPLANNED, to, (value,), (copy,), after.calls),
        Operation(UNPLANNED, back, (copy,), (value,), after.calls),
    )


def inlined(
    program: Program, closed: Any, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[list[Operation], dict[int, int]]:
    """The operations of a jaxpr, on values of a program.

    Args:
        program: The program, which gets new values.
        closed: The jaxpr.
        inputs: The values that it is given.
        outputs: The numbers that its results get.

    Returns:
        The operations; and for results that are another result, or a value that it is given, what they are.
    """
    part = Program.of(closed, UNPLANNED)
    numbers = dict(zip(part.inputs, inputs, strict=True))
    for number, value in part.constants.items():
        numbers[number] = program.add_constant(value, part.types[number])
    wanted: dict[int, int] = {}
    for value, number in zip(part.outputs, outputs, strict=True):
        wanted.setdefault(value, number)
    operations = []
    for operation in part.operations:
        for value in operation.outputs:
            numbers[value] = wanted[value] if value in wanted else program.add_value(part.types[value])
        read, made = (tuple(numbers[v] for v in side) for side in (operation.inputs, operation.outputs))
        operations.append(operation._replace(inputs=read, outputs=made))
    same = {number: numbers[value] for value, number in zip(part.outputs, outputs, strict=True)}
    return operations, {number: value for number, value in same.items() if number != value}


def replaced(operation: Operation, values: Mapping[int, int]) -> Operation:
    """An operation that reads other values."""
    return operation._replace(inputs=tuple(values.get(value, value) for value in operation.inputs))


def _is_literal(program: Program, value: int) -> bool:
    return value in program.constants and jax_compat.is_literal(program.constants[value], program.types[value])
