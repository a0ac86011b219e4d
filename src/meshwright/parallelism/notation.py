"""Operations in symbols, such as ``B_x S D · D F_y → B_x S F_y``."""

from collections.abc import Sequence

from meshwright.parallelism.axis_uses import AxisFacts
from meshwright.parallelism.words import symbols
from meshwright.plans.records.traced_program import VIRTUAL, Nest


def notation(facts: AxisFacts, op: int) -> str:
    """An operation in symbols, each tensor as the operation splits it."""
    program = facts.program
    nest = program.nests[int(program.nest[op])]
    assigned = program.assignments[program.assignment[op]] if program.assignment[op] != VIRTUAL else ()
    sides = ((program.reads_of(op), nest.operands), (program.made_by(op), nest.results))
    texts = [
        [_tensor(facts, value, dims, assigned) for value, dims in zip(values, tensors, strict=True) if dims]
        for values, tensors in sides
    ]
    return f"{' · '.join(texts[0])} → {', '.join(texts[1]) or 'scalar'}{_summed(facts, nest, assigned)}"


def _tensor(facts: AxisFacts, value: int, dims: Sequence[Sequence[int]], assigned: Sequence[int]) -> str:
    spec = [tuple(facts.names[a] for a, loop in enumerate(assigned) if loop in dim) for dim in dims]
    return symbols(facts.program.shape(value), facts.letters_of(value), spec)


def _summed(facts: AxisFacts, nest: Nest, assigned: Sequence[int]) -> str:
    indexed = {loop for dim in nest.results[0] for loop in dim} if nest.results else set()
    axes = [facts.names[a] for a, loop in enumerate(assigned) if loop >= 0 and loop not in indexed]
    return f" (summed over {', '.join(axes)})" if axes else ""
