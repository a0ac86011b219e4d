"""The pseudo-primitives by which a traced graph speaks of loops and branches."""

from meshwright.rules.base import LoopNest, Rule, Signature
from meshwright.rules.builder import Loops, same_shape


def loop_carry(op: Signature) -> LoopNest | None:
    """A value handed from one iteration to the next, in place; its sharding is a choice, tied at both ends."""
    return same_shape(op, fusible=True, leads=True)


def loop_slice(op: Signature) -> LoopNest:
    """One iteration's slice of a stacked input: the leading dim is walked in time and stays whole."""
    loops = Loops()
    operand = loops.spread(op.operands[0].shape, fixed=[0])
    return loops.nest([operand], [operand[1:]])


def loop_stack(op: Signature) -> LoopNest:
    """One iteration's output put into its place in the stacked result."""
    loops = Loops()
    result = loops.spread(op.results[0].shape, fixed=[0])
    return loops.nest([result[1:]], [result])


def branch_merge(op: Signature) -> LoopNest | None:
    """Whichever branch ran gives the value."""
    return same_shape(op, fusible=True)


RULES: dict[str, Rule] = {
    "loop_carry": loop_carry,
    "loop_slice": loop_slice,
    "loop_stack": loop_stack,
    "branch_merge": branch_merge,
}
