"""Operations that create, cut and join arrays by position alone: iota, concatenate, pad, split, reverse and others."""

from meshwright.rules.base import LoopNest, Rule, Signature
from meshwright.rules.builder import Loops, same_shape


def made(op: Signature) -> LoopNest:
    """Arrays created without operands: every shard counts from its own offset."""
    loops = Loops()
    operands = [loops.fixed(tensor.shape) for tensor in op.operands]
    result = loops.spread(op.results[0].shape)
    return loops.nest(operands, [result] * len(op.results), fusible=True)


def concatenate(op: Signature) -> LoopNest:
    """The joined dim stays whole: the parts' borders are not the shards' borders."""
    axis = op.params["dimension"]
    loops = Loops()
    result = loops.spread(op.results[0].shape, fixed=[axis])
    operands = [
        (*result[:axis], loops.add(tensor.shape[axis], "unsplittable"), *result[axis + 1 :]) for tensor in op.operands
    ]
    return loops.nest(operands, [result], fusible=True)


def split(op: Signature) -> LoopNest:
    """The inverse of concatenate."""
    axis = op.params["axis"]
    loops = Loops()
    operand = loops.spread(op.operands[0].shape, fixed=[axis])
    results = [
        (*operand[:axis], loops.add(tensor.shape[axis], "unsplittable"), *operand[axis + 1 :]) for tensor in op.results
    ]
    return loops.nest([operand], results, fusible=True)


def stack(op: Signature) -> LoopNest:
    """Arrays of one shape put side by side along a new dim, which stays whole."""
    axis = op.params["axis"]
    loops = Loops()
    result = loops.spread(op.results[0].shape, fixed=[axis])
    return loops.nest([result[:axis] + result[axis + 1 :]] * len(op.operands), [result], fusible=True)


def unstack(op: Signature) -> LoopNest:
    """The inverse of stack."""
    axis = op.params["axis"]
    loops = Loops()
    operand = loops.spread(op.operands[0].shape, fixed=[axis])
    return loops.nest([operand], [operand[:axis] + operand[axis + 1 :]] * len(op.results), fusible=True)


def tile(op: Signature) -> LoopNest:
    """Repetitions are the major part of each dim of the result."""
    loops = Loops()
    operand = loops.spread(op.operands[0].shape)
    result = [
        (loops.add(repeats) if repeats > 1 else ()) + dim
        for repeats, dim in zip(op.params["reps"], operand, strict=True)
    ]
    return loops.nest([operand], [tuple(result)], fusible=True)


def pad(op: Signature) -> LoopNest:
    """Padded dims stay whole; the padding value is needed everywhere."""
    loops = Loops()
    operand, result = [], []
    for size, widened, padding in zip(
        op.operands[0].shape, op.results[0].shape, op.params["padding_config"], strict=True
    ):
        if any(padding):
            operand.append(loops.add(size, "unsplittable"))
            result.append(loops.add(widened, "unsplittable"))
        else:
            dim = loops.add(size)
            operand.append(dim)
            result.append(dim)
    return loops.nest([tuple(operand), ()], [tuple(result)], fusible=True)


def rev(op: Signature) -> LoopNest | None:
    """Reversed dims stay whole: every element would change its device."""
    return same_shape(op, fixed=op.params["dimensions"], fusible=True)


RULES: dict[str, Rule] = {
    "iota": made,
    "iota_2x32_shape": made,
    "platform_index": made,
    "empty": made,
    "empty2": made,
    "concatenate": concatenate,
    "split": split,
    "stack": stack,
    "unstack": unstack,
    "tile": tile,
    "pad": pad,
    "rev": rev,
}
