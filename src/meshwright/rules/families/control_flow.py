"""The pseudo-primitives that represent loops and branches in a traced graph."""

from meshwright.rules.base import LoopNest, Rule, Signature
from meshwright.rules.builder import Loops, same_shape


def loop_carry(op: Signature) -> LoopNest | None:
    """A value passed from one iteration to the next, in place; its sharding is chosen, and the same at both ends."""
    return same_shape(op, fusible=True, leads=True)


def loop_slice(op: Signature) -> LoopNest:
    """One iteration's slice of a stacked input: the loop steps along the leading dim, which stays whole."""
    loops = Loops()
    operand = loops.spread(op.operands[0].shape, fixed=[0])
    return loops.nest([operand], [operand[1:]])


def loop_stack(op: Signature) -> LoopNest:
    """One iteration's output, written to its position in the stacked result."""
    loops = Loops()
    result = loops.spread(op.results[0].shape, fixed=[0])
    return loops.nest([result[1:]], [result])


def branch_merge(op: Signature) -> LoopNest | None:
    """The value of the branch that ran."""
    return same_shape(op, fusible=True)


RULES: dict[str, Rule] = {
    "loop_carry": loop_carry,
    "loop_slice": loop_slice,
    "loop_stack": loop_stack,
    "branch_merge": branch_merge,
}
