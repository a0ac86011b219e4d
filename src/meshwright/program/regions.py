"""Operations that run other regions than the user's: of loops, branches and checkpoints, for passes."""

from collections.abc import Sequence

from meshwright import jax_compat
from meshwright.program.as_jaxpr import as_jaxpr
from meshwright.program.parts import part_of
from meshwright.program.program import COND, SCAN, Operation, Program, bodies_of


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
    bodies = list(map(as_jaxpr, found, bodies_of(like.equation)))
    if like.name == SCAN:
        equation = jax_compat.scan_of(like.equation, bodies[0], (counts[0] + len(arrays), counts[1]))
    else:
        equation = jax_compat.with_bodies(like.equation, bodies)
    made = [program.add_value(v.aval) for v in equation.outvars] if outputs is None else outputs
    first = 1 if like.name == COND else 0
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
