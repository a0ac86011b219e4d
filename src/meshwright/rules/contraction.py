"""Contractions: matrix products in all their batched and ragged forms."""

from math import prod

from meshwright.rules.base import Dims, LoopNest, Rule, Signature
from meshwright.rules.builder import Loops


def dot_general(op: Signature) -> LoopNest:
    """``b… m… k…, b… k… n… -> b… m… n…`` with k summed."""
    lhs, rhs = op.operands[0].shape, op.operands[1].shape
    return _product(Loops(), op, lhs, rhs)


def _product(loops: Loops, op: Signature, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> LoopNest:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = op.params["dimension_numbers"]
    left: dict[int, tuple[int, ...]] = {d: loops.add(lhs[d]) for d in lhs_batch}
    right = {r: left[d] for d, r in zip(lhs_batch, rhs_batch, strict=True)}
    for d, r in zip(lhs_contract, rhs_contract, strict=True):
        left[d] = right[r] = loops.add(lhs[d], "sum")
    rows = _fill(loops, left, lhs)
    columns = _fill(loops, right, rhs)
    result = (*(left[d] for d in lhs_batch), *rows, *columns)
    flops = 2.0 * prod(loop.size for loop in loops.loops)
    return loops.nest([_ordered(left), _ordered(right)], [result], flops, leads=True)


def _fill(loops: Loops, dims: dict[int, tuple[int, ...]], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Gives every dim that has no loop yet a parallel one, in order."""
    free = [d for d in range(len(shape)) if d not in dims]
    for d in free:
        dims[d] = loops.add(shape[d])
    return [dims[d] for d in free]


def _ordered(dims: dict[int, tuple[int, ...]]) -> Dims:
    return tuple(dims[d] for d in range(len(dims)))


RULES: dict[str, Rule] = {"dot_general": dot_general}
