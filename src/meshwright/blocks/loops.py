"""The loops of a contraction by type: which tensors a loop indexes says what splitting it means."""

from collections.abc import Sequence

from meshwright.rules import LoopNest

#: Of the result and of the data; of the result and of the weights; of all three; of both operands, summed.
TYPES = ROWS, COLUMNS, BATCH, CONTRACTED = "rows", "columns", "batch", "contracted"
BITS = {name: 1 << place for place, name in enumerate(TYPES)}


def is_contraction(nest: LoopNest) -> bool:
    """Whether an operation multiplies arrays on the matrix unit."""
    return nest.leads and nest.flops > 0 and len(nest.operands) > 1


def is_lookup(nest: LoopNest) -> bool:
    """Whether an operation looks up in a table, or adds to it, at computed positions."""
    return nest.leads and not nest.flops and len(nest.operands) > 1


def leading_loop(nest: LoopNest, dim: Sequence[int]) -> int:
    """The loop of a dim that a split of the dim splits first; -1 for a dim of one element."""
    return next((loop for loop in dim if nest.loops[loop].size > 1), -1)


def loops_by_type(nest: LoopNest, data: int) -> dict[str, tuple[int, ...]]:
    """The loops of each type that can be split, in order; ``data`` is the operand that is not the weights."""
    result = {loop for dim in nest.results[0] for loop in dim}
    operands = [{loop for dim in dims for loop in dim} for dims in nest.operands]
    of_data = operands[data]
    of_rest = set().union(*(loops for place, loops in enumerate(operands) if place != data))
    loops_of: dict[str, tuple[int, ...]] = {}
    for index, loop in enumerate(nest.loops):
        if loop.size < 2 or loop.kind == "unsplittable" or index == nest.mixing.ring:
            continue
        if index in result:
            name = BATCH if index in of_data & of_rest else ROWS if index in of_data else COLUMNS
        else:
            name = CONTRACTED
        loops_of[name] = (*loops_of.get(name, ()), index)
    return {name: loops_of[name] for name in TYPES if name in loops_of}
