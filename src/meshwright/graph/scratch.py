"""What XLA's CPU backend takes while it does one operation, beside what that reads and makes.

It has no kernels for some operations and writes others in their place; what is in memory between those is told here, as
read off the programs that it compiles.
"""

from collections.abc import Callable

from meshwright.rules.base import Signature

_PLACE_BYTES = 4  # of one number that says where an element is


def scratch(op: Signature) -> tuple[float, ...] | None:
    """Bytes that an operation takes in passing, as multiples of each operand's; None where there are none."""
    told = _SCRATCH.get(op.primitive)
    return None if told is None else told(op)


def _selection(op: Signature) -> tuple[float, ...]:
    """The gradient of max pooling goes to the largest element of each window.

    To find it, elements are compared together with their places: an array of places along each dim is as large as what
    was pooled, one along each dim as what came of it, and so is the largest element itself. All of them are gone before
    the result, as large as what was pooled, is there.

    >>> from meshwright.rules.base import TensorType
    >>> part, whole = TensorType((8, 4, 4), "float32", 4), TensorType((8, 8, 8), "float32", 4)
    >>> scratch(Signature("select_and_scatter_add", {}, (part, whole), (whole,)))
    (4.0, 2.0)
    """
    whole = op.results[0]
    places = len(whole.shape) * _PLACE_BYTES / whole.itemsize
    found = {"select_and_scatter_add": (places + 1, places - 1), "select_and_scatter": (places - 1, places + 1)}
    return found[op.primitive] + (0.0,) * (len(op.operands) - 2)


_SCRATCH: dict[str, Callable[[Signature], tuple[float, ...]]] = {
    "select_and_scatter_add": _selection,
    "select_and_scatter": _selection,
}
