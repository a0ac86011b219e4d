"""Transforms and matrix decompositions: batch dims are parallel, transformed dims stay whole."""

from meshwright.rules.base import LoopNest, Rule, Signature
from meshwright.rules.builder import Loops

# How many dims of each operand belong to one problem; the dims before them are batch dims.
CORE_RANKS = {
    "cholesky": (2,),
    "cholesky_update": (2, 1),
    "eig": (2,),
    "eigh": (2,),
    "hessenberg": (2,),
    "householder_product": (2, 1),
    "lu": (2,),
    "lu_pivots_to_permutation": (1,),
    "ormqr": (2, 1, 2),
    "qr": (2,),
    "schur": (2,),
    "svd": (2,),
    "symmetric_product": (2, 2),
    "tridiagonal": (2,),
    "tridiagonal_solve": (1, 1, 1, 2),
}


def decomposition(op: Signature) -> LoopNest | None:
    """Batch dims are those before the matrix of the first operand; all tensors share them."""
    return _batched(op, CORE_RANKS[op.primitive])


def fft(op: Signature) -> LoopNest | None:
    """The last dims, as many as there are lengths, are transformed."""
    return _batched(op, (len(op.params["fft_lengths"]),))


def triangular_solve(op: Signature) -> LoopNest:
    """Solves for every column of the right-hand side (for every row, where the matrix stands on the right)."""
    loops = Loops()
    right_hand_side = op.operands[1].shape
    rank = len(right_hand_side)
    result = loops.spread(right_hand_side, fixed=[rank - 2 if op.params["left_side"] else rank - 1])
    matrix = (*result[:-2], *loops.fixed(op.operands[0].shape[-2:]))
    return loops.nest([matrix, result], [result])


def _batched(op: Signature, ranks: tuple[int, ...]) -> LoopNest | None:
    shapes = [tensor.shape for tensor in (*op.operands, *op.results)]
    num_batch = len(shapes[0]) - ranks[0]
    batch = shapes[0][:num_batch]
    loops = Loops()
    leading = loops.spread(batch)
    if any(shape[:num_batch] != batch for shape in shapes):
        return None
    dims = [(*leading, *loops.fixed(shape[num_batch:])) for shape in shapes]
    return loops.nest(dims[: len(op.operands)], dims[len(op.operands) :])


RULES: dict[str, Rule] = {**dict.fromkeys(CORE_RANKS, decomposition), "fft": fft, "triangular_solve": triangular_solve}
