"""Sorting, selection and cumulative operations: the dim along which elements are ordered or carried stays whole."""

from meshwright.rules.base import LoopNest, Rule, Signature
from meshwright.rules.builder import Loops, same_shape


def sort(op: Signature) -> LoopNest | None:
    """Sorts any number of arrays together along one dim."""
    return same_shape(op, fixed=[op.params["dimension"]])


def top_k(op: Signature) -> LoopNest:
    """Values and indices of the largest elements along one dim, which has another size in the results."""
    shape = op.operands[0].shape
    axis = op.params.get("axis", op.params.get("reduction_dimension", len(shape) - 1)) % len(shape)
    loops = Loops()
    operand = list(loops.spread(shape, fixed=[axis]))
    result = operand.copy()
    result[axis] = loops.add(op.results[0].shape[axis], "unsplittable")
    return loops.nest([tuple(operand)] * len(op.operands), [tuple(result)] * len(op.results))


def cumulative(op: Signature) -> LoopNest | None:
    """All dims are parallel but the scanned one."""
    return same_shape(op, fixed=[op.params["axis"]])


RULES: dict[str, Rule] = {
    "sort": sort,
    "top_k": top_k,
    "approx_top_k": top_k,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), cumulative),
}
