"""Contractions: matrix products in all their batched and ragged forms."""

from math import prod

from meshwright.rules.base import Dims, LoopNest, Rule, Signature, nest, settled_as
from meshwright.rules.builder import Loops, ordered

Dim = tuple[int, ...]


def dot_general(op: Signature) -> LoopNest:
    """``b… m… k…, b… k… n… -> b… m… n…`` with k summed."""
    loops = Loops()
    left, right, result = _product(loops, op, op.params["dimension_numbers"], {})
    return loops.nest([left, right], [result], 2.0 * prod(loop.size for loop in loops.loops), leads=True)


def ragged_dot_general(op: Signature) -> LoopNest | None:
    """Products of groups of rows with the matrix of their group, where the groups' sizes are data.

    The sizes are small and needed whole: from them and its own offset each shard computes where its groups begin. So

    * rows (``m``, or ``k`` in the gradient of the matrices) split like any loop: a shard clips the sizes to its rows;
    * groups split too: a shard multiplies the rows of its own groups. In ``m k, g k n -> m n`` it leaves zeros in the
      rows of other groups, so the groups are a sum loop; in ``m k, k n -> g m n`` they are parallel.
    """
    if op.params.get("group_offset") is not None:
        return None
    numbers = op.params["ragged_dot_dimension_numbers"]
    ((lhs_contract, _), _) = numbers.dot_dimension_numbers
    loops = Loops()
    groups = {d: loops.add(op.operands[1].shape[d], "sum") for d in numbers.rhs_group_dimensions}
    left, right, result = _product(loops, op, numbers.dot_dimension_numbers, groups)
    flops = 2.0 * prod(loop.size for loop in loops.loops[len(groups) :])
    if numbers.lhs_ragged_dimensions[0] in lhs_contract:
        result = (loops.add(op.results[0].shape[0]), *result)
    return loops.nest([left, right, loops.fixed(op.operands[2].shape)], [result], flops, leads=True)


def scaled_matmul(op: Signature) -> LoopNest | None:
    """A product of narrow floats in which each block along k has its own scale; blocks stay whole."""
    lhs, scales = op.operands[0].shape, op.operands[2].shape
    if not scales[2] or lhs[2] % scales[2]:
        return None
    return nest(
        "b m (k e), b n (k e), b m k, b n k -> b m n",
        op,
        sizes={"k": scales[2], "e": lhs[2] // scales[2]},
        reduce={"k": "sum"},
        unsplittable="e",
        flops=2.0 * prod(lhs) * op.operands[1].shape[1],
        leads=True,
    )


def _product(loops: Loops, op: Signature, numbers: tuple, right: dict[int, Dim]) -> tuple[Dims, Dims, Dims]:
    """Dims of both operands and the result; ``right`` holds dims of the second operand that have a loop already."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    lhs, rhs = op.operands[0].shape, op.operands[1].shape
    left: dict[int, Dim] = {d: loops.add(lhs[d]) for d in lhs_batch}
    right = right | {r: left[d] for d, r in zip(lhs_batch, rhs_batch, strict=True)}
    for d, r in zip(lhs_contract, rhs_contract, strict=True):
        left[d] = right[r] = loops.add(lhs[d], settled_as("sum", op.results[0].dtype))
    rows = _fill(loops, left, lhs)
    columns = _fill(loops, right, rhs)
    return ordered(left), ordered(right), (*(left[d] for d in lhs_batch), *rows, *columns)


def _fill(loops: Loops, dims: dict[int, Dim], shape: tuple[int, ...]) -> list[Dim]:
    """Gives every dim that has no loop yet a parallel one, in order."""
    free = [d for d in range(len(shape)) if d not in dims]
    for d in free:
        dims[d] = loops.add(shape[d])
    return [dims[d] for d in free]


RULES: dict[str, Rule] = {
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot_general,
    "ragged_dot": ragged_dot_general,
    "scaled_matmul_wrapper": scaled_matmul,
}
