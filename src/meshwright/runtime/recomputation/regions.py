"""What a backward pass computes again as an operation of its own: which operations that takes, and what runs them."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from meshwright import jax_compat
from meshwright.program.parts import part_of
from meshwright.program.program import UNPLANNED, Operation, Program
from meshwright.program.regions import with_regions


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
    like = Operation(UNPLANNED, jax_compat.backward_checkpoint(operations[0].equation, prevent_cse), (), ())
    made = with_regions(program, like, [part], inputs)
    return made, dict(zip(outputs, made.outputs, strict=True))


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


def replaced(operation: Operation, values: Mapping[int, int]) -> Operation:
    """An operation that reads other values."""
    return operation._replace(inputs=tuple(values.get(value, value) for value in operation.inputs))


def _is_literal(program: Program, value: int) -> bool:
    return value in program.constants and jax_compat.is_literal(program.constants[value], program.types[value])
