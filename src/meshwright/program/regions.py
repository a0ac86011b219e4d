"""Operations that run other regions than the user's: of loops, branches and checkpoints, for passes."""

from collections.abc import Sequence
from typing import Any

from meshwright import jax_compat
from meshwright.program.parts import part_of
from meshwright.program.program import SCAN, Operation, Program, bodies_of


def with_regions(
    program: Program,
    like: Operation,
    regions: Sequence[Program],
    operands: Sequence[int],
    counts: tuple[int, int] = (0, 0),
    outputs: Sequence[int] | None = None,
) -> Operation:
    """A scan, a conditional or a checkpoint that runs other regions, with the ids of one that there is.

    Arrays among the constants of the regions become operands, since a jaxpr that an operation runs has none.

    Args:
        program: The program in which it is to be, which gets new values; it is its caller's to put into it.
        like: The operation that there is.
        regions: What it is to run.
        operands: The values that the regions are given; of a conditional, after the number of the branch.
        counts: Of a scan, how many of these are the same for all trips, and how many it carries.
        outputs: The numbers of its results; by default new ones.
    """
    found, arrays = _with_arrays_given(regions, program)
    bodies = list(map(_as_jaxpr, found, bodies_of(like.equation)))
    if like.name == SCAN:
        equation = jax_compat.scan_of(like.equation, bodies[0], (counts[0] + len(arrays), counts[1]))
    else:
        equation = jax_compat.with_bodies(like.equation, bodies)
    made = [program.add_value(v.aval) for v in equation.outvars] if outputs is None else outputs
    first = like.num_choosing
    inputs = (*operands[:first], *arrays, *operands[first:])
    return like._replace(equation=equation, inputs=inputs, outputs=tuple(made), regions=tuple(found))


def _with_arrays_given(regions: Sequence[Program], around: Program) -> tuple[list[Program], list[int]]:
    """Regions all of which are given the arrays of all, before their inputs; and these, as constants around them."""
    held = [
        [n for n, value in region.constants.items() if not jax_compat.is_literal(value, region.types[n])]
        for region in regions
    ]
    if not any(held):
        return list(regions), []
    found, arrays = [], []
    for place, (region, own) in enumerate(zip(regions, held, strict=True)):
        arrays += [around.add_constant(region.constants[n], region.types[n]) for n in own]
        given = [
            n if other == place else region.add_value(regions[other].types[n])
            for other, numbers in enumerate(held)
            for n in numbers
        ]
        found.append(part_of(region, [*given, *region.inputs], region.operations, region.outputs))
    return found, arrays


def _as_jaxpr(program: Program, like: Any) -> jax_compat.ClosedJaxpr:
    """The closed jaxpr of a program; calls stay inlined, and their names are on the operations that were in them.

    Args:
        program: The program. Operations with regions run the regions of their equations, so a pass that changes a
            region changes the equation.
        like: Another closed jaxpr, whose effects and remarks are kept.
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
