"""Random bits and the keys they come from."""

from meshwright.rules.base import LoopNest, Rule, Signature
from meshwright.rules.builder import Loops, same_leading, same_shape

# Keys whose bits depend on key and position alone, so that each shard can compute its own.
COUNTER_BASED = ("key<fry>", "key<fry4>", "key<phx2>", "key<phx4>")


def random_bits(op: Signature) -> LoopNest:
    """Bits for every key: the keys' dims lead, the shape asked for follows."""
    keys, bits = op.operands[0], op.results[0].shape
    loops = Loops()
    operand = loops.spread(keys.shape)
    tail = bits[len(keys.shape) :]
    local = keys.dtype in COUNTER_BASED
    return loops.nest([operand], [(*operand, *(loops.spread(tail) if local else loops.fixed(tail)))], fusible=local)


def random_split(op: Signature) -> LoopNest:
    """New keys for every key."""
    loops = Loops()
    operand = loops.spread(op.operands[0].shape)
    return loops.nest([operand], [(*operand, *loops.spread(op.results[0].shape[len(operand) :]))], fusible=True)


def per_key(op: Signature) -> LoopNest | None:
    """One key from one key or seed, with or without a number to fold in."""
    return same_shape(op, fusible=True)


def words(op: Signature) -> LoopNest | None:
    """Keys to raw words or back: the words of one key stay together."""
    return same_leading(op, fusible=True)


def random_gamma(op: Signature) -> LoopNest | None:
    """A sample for each parameter, from a key for each of the leading dims."""
    keys, shape = op.operands[0], op.operands[1].shape
    if shape[: len(keys.shape)] != keys.shape:
        return None
    loops = Loops()
    rest = range(len(keys.shape), len(shape))
    samples = loops.spread(shape, fixed=() if keys.dtype in COUNTER_BASED else rest)
    return loops.nest([samples[: len(keys.shape)], samples], [samples])


def whole(op: Signature) -> LoopNest:
    """A generator with hidden state: every device generates all numbers, so that they do not depend on the split."""
    loops = Loops()
    return loops.nest([loops.fixed(t.shape) for t in op.operands], [loops.fixed(t.shape) for t in op.results])


RULES: dict[str, Rule] = {
    "random_bits": random_bits,
    "random_split": random_split,
    "random_seed": per_key,
    "random_fold_in": per_key,
    "random_clone": per_key,
    "random_wrap": words,
    "random_unwrap": words,
    "to_edtype": words,
    "from_edtype": words,
    "random_gamma": random_gamma,
    "rng_bit_generator": whole,
    "rng_uniform": whole,
}
