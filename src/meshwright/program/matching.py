"""Which operation is which, where a part of a program was traced again: it gets the ids of what it was traced from."""

from collections.abc import Sequence

from meshwright.program.program import Operation, Program

_CONVERSION = "convert_element_type"  # JAX leaves out one to the type that its operand has already


def with_ids_of(original: Operation, program: Program, values: Sequence[int]) -> Program | None:
    """A program whose operations have the ids of the operation that it was traced from; None if it runs something else.

    Where a sum is kept in float32 for all microbatches, conversions to float32 are gone from what is traced again, or
    operands are converted that were not: the plan says nothing of such conversions, which run as their readers need
    them. Results of a loop or of branches that nothing reads are gone as well.

    Args:
        original: The operation.
        program: What was traced: one operation, which may read conversions, or none if it was one that is gone.
        values: Which of the original's values the program's results are.
    """
    matched = _matched(program, [original])
    if matched is None or not original.regions or original.is_checkpoint:
        return matched
    (operation,) = matched.operations
    places = dict(zip(program.outputs, map(original.outputs.index, values), strict=True))
    if operation.num_carry == original.num_carry:  # JAX makes a carry that no trip changes a constant
        places.update(zip(operation.outputs, range(original.num_carry), strict=False))
    if not all(output in places for output in operation.outputs):
        return None
    ids = [*original.carry_ids, *original.result_ids]
    kept = [ids[places[output]] for output in operation.outputs]
    count = operation.num_carry
    matched.operations[:] = [operation._replace(kept_ids=(kept[:count], original.slice_ids, kept[count:]))]
    return matched


def _matched(program: Program, originals: Sequence[Operation]) -> Program | None:
    operations: list[Operation] = []
    rest = list(originals)
    for operation in program.operations:
        gone = 0
        while gone < len(rest) and rest[gone].name == _CONVERSION and _kind(rest[gone]) != _kind(operation):
            gone += 1
        if gone < len(rest) and _kind(rest[gone]) == _kind(operation):
            numbered = _numbered(operation, rest[gone])
            del rest[: gone + 1]
        else:
            numbered = operation if operation.name == _CONVERSION else None
        if numbered is None:
            return None
        operations.append(numbered)
    if any(left.name != _CONVERSION for left in rest):
        return None
    constants, donated = program.constants, program.donated
    return Program(program.types, program.inputs, operations, program.outputs, constants, donated)


def _kind(operation: Operation) -> tuple:
    """What is the same however many rows of the batch an operation computes, and whatever reads its results."""
    num_inputs = 0 if operation.regions else len(operation.inputs)  # a constant may be an input, too
    num_dims = operation.equation.outvars[0].aval.ndim if operation.name == _CONVERSION else 0
    counts = (num_inputs, len(operation.regions), len(operation.slice_ids), num_dims)
    return operation.name, counts, operation.equation.params.get("new_dtype")


def _numbered(operation: Operation, original: Operation) -> Operation | None:
    regions = []
    for region, same in zip(operation.regions, original.regions, strict=True):
        matched = _matched(region, same.operations)
        if matched is None:
            return None
        regions.append(matched)
    return operation._replace(id=original.id, regions=tuple(regions), num_ids=original.num_ids)
