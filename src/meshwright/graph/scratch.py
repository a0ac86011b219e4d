"""What XLA's CPU backend takes while it does one operation, beside what that reads and makes.

It has no kernels for some operations and writes others in their place; what is in memory between those is told here, as
read off the programs that it compiles.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from meshwright.graph.graph import cpu_itemsize
from meshwright.rules.base import Dims, LoopNest, Signature

_PLACE_BYTES = 4  # of one number that says where an element is
_MASK_BYTES = 1


class Scratch(NamedTuple):
    """Arrays that an operation takes in passing, or what they take more than something that is counted already.

    Attributes:
        num_bytes: All of them together, on one device that does the whole operation.
        dims: The loops that index each of their dims.
    """

    num_bytes: float
    dims: Dims


def _selection(op: Signature, nest: LoopNest) -> list[Scratch]:
    """The gradient of max pooling goes to the largest element of each window.

    To find it, elements are compared together with their places: an array of places along each dim is as large as what
    was pooled, one along each dim as what came of it, and so is the largest element itself. All of them are gone before
    the result, as large as what was pooled, is there.
    """
    source = 0 if op.primitive == "select_and_scatter_add" else 1
    whole, part = op.results[0], op.operands[source]
    places, size = len(whole.shape) * _PLACE_BYTES, cpu_itemsize(whole.dtype, whole.itemsize)
    return [
        Scratch((places - size) * prod(whole.shape), nest.results[0]),
        Scratch((places + size) * prod(part.shape), nest.operands[source]),
    ]


def _ragged(op: Signature, nest: LoopNest) -> list[Scratch]:
    """A product of groups of rows is one of all rows for every group, with zeros in the rows of the others.

    What has such rows is written once for every group, and so is where the zeros are.
    """
    numbers = op.params["ragged_dot_dimension_numbers"]
    ((contracted, _), (along, _)), rows = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions[0]
    if rows in along:  # what is ragged is not looked at
        return []
    sums_rows = rows in contracted
    groups = nest.results[0][0] if sums_rows else nest.operands[1][numbers.rhs_group_dimensions[0]]
    count = prod(nest.loops[loop].size for loop in groups)
    return [
        Scratch(
            count * prod(kind.shape) * (cpu_itemsize(kind.dtype, kind.itemsize) + _MASK_BYTES),
            (groups, *nest.operands[side]),
        )
        for side, kind in enumerate(op.operands[: 1 + sums_rows])
    ]


# By primitive, what tells it for an operation and its loop nest.
TAKING: dict[str, Callable[[Signature, LoopNest], list[Scratch]]] = {
    "select_and_scatter_add": _selection,
    "select_and_scatter": _selection,
    "ragged_dot_general": _ragged,
}
