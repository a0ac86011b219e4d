"""Slices at fixed and at computed positions; a dim that is sliced in part stays whole."""

from collections.abc import Sequence

from meshwright.rules.base import Dims, LoopNest, Rule, Signature
from meshwright.rules.builder import Loops


def slice_(op: Signature) -> LoopNest:
    """Dims taken whole and in order are parallel."""
    return _window(op, op.operands[0].shape, op.results[0].shape)


def dynamic_slice(op: Signature) -> LoopNest:
    """As `slice_`; the start positions are scalars."""
    return _window(op, op.operands[0].shape, op.results[0].shape)


def _window(op: Signature, whole: Sequence[int], part: Sequence[int]) -> LoopNest:
    loops = Loops()
    operand, result = [], []
    for size, taken in zip(whole, part, strict=True):
        dim = loops.add(size, "parallel" if size == taken else "unsplittable")
        operand.append(dim)
        result.append(dim if size == taken else loops.add(taken, "unsplittable"))
    starts: list[Dims] = [loops.fixed(tensor.shape) for tensor in op.operands[1:]]
    return loops.nest([tuple(operand), *starts], [tuple(result)], fusible=True)


def dynamic_update_slice(op: Signature) -> LoopNest:
    """A dim that is replaced whole is parallel, and so is a dim at a single position (a KV cache's sequence).

    The shard that holds the position writes it and the others do not; a longer window could cross a border.
    """
    whole, part = op.operands[0].shape, op.operands[1].shape
    loops = Loops()
    operand, update = [], []
    for size, written in zip(whole, part, strict=True):
        dim = loops.add(size, "parallel" if written in (1, size) else "unsplittable")
        operand.append(dim)
        update.append(dim if size == written else loops.add(written, "unsplittable"))
    starts = [loops.fixed(tensor.shape) for tensor in op.operands[2:]]
    return loops.nest([tuple(operand), tuple(update), *starts], [tuple(operand)])


RULES: dict[str, Rule] = {
    "slice": slice_,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}
