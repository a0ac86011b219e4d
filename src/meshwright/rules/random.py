"""Random bits and the keys they come from."""

from meshwright.rules.base import LoopNest, Rule, Signature
from meshwright.rules.builder import Loops, same_shape

COUNTER_BASED = "key<fry>"  # the only kind of key whose bits each shard can make from its own offset


def random_bits(op: Signature) -> LoopNest:
    """Bits for every key: the keys' dims lead, the shape asked for follows."""
    keys, bits = op.operands[0], op.results[0].shape
    loops = Loops()
    operand = loops.spread(keys.shape)
    tail = bits[len(keys.shape) :]
    local = keys.dtype == COUNTER_BASED
    return loops.nest([operand], [(*operand, *(loops.spread(tail) if local else loops.fixed(tail)))], fusible=local)


def random_split(op: Signature) -> LoopNest:
    """New keys for every key."""
    loops = Loops()
    operand = loops.spread(op.operands[0].shape)
    return loops.nest([operand], [(*operand, *loops.spread(op.results[0].shape[len(operand) :]))], fusible=True)


def per_key(op: Signature) -> LoopNest | None:
    """One key from one key or seed, with or without a number to fold in."""
    return same_shape(op, fusible=True)


def random_wrap(op: Signature) -> LoopNest:
    """Raw words to keys: the words of one key stay together."""
    loops = Loops()
    operand = loops.spread(op.operands[0].shape, fixed=range(len(op.results[0].shape), len(op.operands[0].shape)))
    return loops.nest([operand], [operand[: len(op.results[0].shape)]], fusible=True)


def random_unwrap(op: Signature) -> LoopNest:
    """Keys to raw words."""
    loops = Loops()
    result = loops.spread(op.results[0].shape, fixed=range(len(op.operands[0].shape), len(op.results[0].shape)))
    return loops.nest([result[: len(op.operands[0].shape)]], [result], fusible=True)


def whole(op: Signature) -> LoopNest:
    """A generator with hidden state: every device makes all of it, so that its numbers do not depend on the split."""
    loops = Loops()
    return loops.nest([loops.fixed(t.shape) for t in op.operands], [loops.fixed(t.shape) for t in op.results])


RULES: dict[str, Rule] = {
    "random_bits": random_bits,
    "random_split": random_split,
    "random_seed": per_key,
    "random_fold_in": per_key,
    "random_clone": per_key,
    "random_wrap": random_wrap,
    "random_unwrap": random_unwrap,
    "rng_bit_generator": whole,
    "rng_uniform": whole,
}
