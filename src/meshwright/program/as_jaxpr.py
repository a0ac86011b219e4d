"""A program as a closed jaxpr again, for passes that change programs: the inverse of `Program.of`."""

from typing import Any

from meshwright import jax_compat
from meshwright.program.program import Program


def as_jaxpr(program: Program, like: Any) -> jax_compat.ClosedJaxpr:
    """The closed jaxpr of a program; calls stay inlined, and their names are on the operations that were in them.

    Args:
        program: The program. Operations with regions run the regions of their equations, so a pass that changes a
            region changes the equation.
        like: The closed jaxpr that the program was made of, or any other: its effects and remarks are kept.
    """
    read = {value for operation in program.operations for value in operation.inputs} | set(program.outputs)
    atoms: dict[int, Any] = {value: jax_compat.variable(program.types[value]) for value in program.inputs}
    arrays: dict[int, Any] = {}
    for number in sorted(read & program.constants.keys()):
        value, aval = program.constants[number], program.types[number]
        if jax_compat.is_literal(value, aval):
            atoms[number] = jax_compat.Literal(value, aval)
        else:
            atoms[number], arrays[number] = jax_compat.variable(aval), value
    equations = []
    for operation in program.operations:
        atoms.update((value, jax_compat.variable(program.types[value])) for value in operation.outputs)
        equations.append(
            jax_compat.with_operands(
                operation.equation,
                [atoms[value] for value in operation.inputs],
                [atoms[value] for value in operation.outputs],
                operation.stack,
            )
        )
    jaxpr = jax_compat.close(like).jaxpr.replace(
        constvars=[atoms[number] for number in arrays],
        invars=[atoms[value] for value in program.inputs],
        outvars=[atoms[value] for value in program.outputs],
        eqns=equations,
    )
    return jax_compat.ClosedJaxpr(jaxpr, list(arrays.values()))
