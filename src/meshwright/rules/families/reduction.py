"""Reductions: dims that disappear leave partial results where they are split."""

from meshwright.rules.base import LoopNest, Rule, Signature, settled_as
from meshwright.rules.builder import Loops

KINDS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "unsplittable",  # no collective computes it
    "argmax": "unsplittable",  # the winner's index would have to travel with its value
    "argmin": "unsplittable",
}


def reduction(op: Signature) -> LoopNest:
    """Kept dims are parallel loops, reduced ones loops of the primitive's kind."""
    axes, kind = set(op.params["axes"]), settled_as(KINDS[op.primitive], op.operands[0].dtype)
    loops = Loops()
    dims = [loops.add(size, kind if i in axes else "parallel") for i, size in enumerate(op.operands[0].shape)]
    kept = tuple(dim for i, dim in enumerate(dims) if i not in axes)
    return loops.nest([tuple(dims)], [kept])


def generic(op: Signature) -> LoopNest | None:
    """A reduction by a user's function: JAX already turns the usual ones into `reduce_sum` and the like."""
    axes = set(op.params["dimensions"])
    arrays = op.operands[: len(op.results)]
    if any(tensor.shape != arrays[0].shape for tensor in arrays):
        return None
    loops = Loops()
    dims = loops.spread(arrays[0].shape, axes)
    kept = tuple(dim for i, dim in enumerate(dims) if i not in axes)
    return loops.nest([dims] * len(arrays) + [()] * len(arrays), [kept] * len(arrays))


RULES: dict[str, Rule] = {**dict.fromkeys(KINDS, reduction), "reduce": generic}
