"""Grows blocks over the forward pass: contractions with new operands enter, and operations follow what they read.

A contraction *joins* the blocks that it reads where some loop indexes two of its operands and comes from a block in
both (the batch and the heads of attention's scores): a split of that loop needs no communication. Any other
contraction, and a look-up in a table that no block made, *enters*: it begins a block. Every other operation follows
the operand whose block was entered last. Two blocks are *siblings* where they read one value and none depends on the
other; siblings that meet in an operation become one block (queries, keys and values; gate and up).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.blocks.loops import BITS, is_contraction, is_lookup, leading_loop, loops_by_type
from meshwright.graph import FORWARD, Graph
from meshwright.rules import LoopNest

Carried = tuple[int, ...]  # for each dim of a value, the bits of the types of loops that a split of it comes from


@dataclass
class Grown:
    """The state of one pass over the forward operations.

    Attributes:
        block: For each value, the operation that entered its block; -1 where it belongs to none.
        rank: For each value, when its block was last entered or carried around a loop: the latest is followed.
        reach: For each value, the blocks it depends on, as bits.
        carried: For each value of a block, the types of loops that its dims come from.
        entered: For each operation that entered a block, its data operand.
        parent: Blocks that were merged point to the block they became.
        of_op: For each forward operation, its block.
    """

    block: list[int]
    rank: list[int]
    reach: list[int]
    carried: dict[int, Carried] = field(default_factory=dict)
    entered: dict[int, int] = field(default_factory=dict)
    parent: dict[int, int] = field(default_factory=dict)
    of_op: dict[int, int] = field(default_factory=dict)

    def find(self, block: int) -> int:
        """The block that a block was merged into."""
        while self.parent.get(block, block) != block:
            block = self.parent[block]
        return block


def grow(graph: Graph, nests: Sequence[LoopNest], numbers: Sequence[int], carries: Mapping[int, int]) -> Grown:
    """Blocks of the forward operations.

    Args:
        graph: The program.
        nests: The loop nest of each operation.
        numbers: The number of each value.
        carries: For each loop carry, the block of the value that the loop's body gives it; absent on a first pass.
    """
    count = graph.columns.num_values
    state = Grown([-1] * count, [-1] * count, [0] * count)
    shared = _Entries(state, numbers)
    for index, op in enumerate(graph.ops):
        if op.phase != FORWARD or not op.inputs:
            continue
        nest = nests[index]
        if op.primitive == "loop_carry":
            _carry(state, index, op.inputs[0], op.outputs[0], carries)
        elif _enters(state, nest, op.inputs):
            shared.enter(index, nest, op.inputs, op.outputs)
        else:
            shared.follow(index, nest, op.inputs, op.outputs)
    state.of_op = {index: state.find(block) for index, block in state.of_op.items()}
    state.block = [state.find(block) if block >= 0 else -1 for block in state.block]
    return state


def _carry(state: Grown, index: int, source: int, value: int, carries: Mapping[int, int]) -> None:
    """A carry belongs with what the loop's body made of it; it is older than all that the body enters."""
    block = carries.get(value, state.block[source])
    if block < 0:
        return
    state.of_op[index] = state.block[value] = block
    state.rank[value], state.reach[value] = index, state.reach[source]
    state.carried[value] = state.carried.get(source, ())


def _enters(state: Grown, nest: LoopNest, inputs: Sequence[int]) -> bool:
    if is_lookup(nest):
        return state.block[inputs[0]] < 0
    return is_contraction(nest) and not _shared_loops(state, nest, inputs)


def _loop_bits(state: Grown, nest: LoopNest, value: int, operand: int) -> dict[int, int]:
    """The loops through which one operand brings a split from its block, with the types it comes from."""
    bits_of = {}
    for dim, bits in zip(nest.operands[operand], state.carried.get(value, ()), strict=False):
        loop = leading_loop(nest, dim)
        if bits and loop >= 0 and nest.loops[loop].kind != "unsplittable":
            bits_of[loop] = bits
    return bits_of


def _shared_loops(state: Grown, nest: LoopNest, inputs: Sequence[int]) -> dict[int, int]:
    """The parallel loops that a contraction's operands bring from blocks, at least two of them at once."""
    bits_of: dict[int, list[int]] = {}
    for operand, value in enumerate(inputs):
        for loop, bits in _loop_bits(state, nest, value, operand).items():
            if nest.loops[loop].kind == "parallel":
                bits_of.setdefault(loop, []).append(bits)
    return {loop: bits[0] | bits[1] for loop, bits in bits_of.items() if len(bits) > 1}


class _Entries:
    """Adds operations to blocks, and merges siblings."""

    def __init__(self, state: Grown, numbers: Sequence[int]):
        self.state = state
        self.numbers = numbers
        self.reads: dict[int, set[int]] = {}  # for each block, the numbers of the values that its entries read
        self.before: dict[int, int] = {}  # and the blocks that it depends on, as bits
        self.bits: dict[int, int] = {}  # and the bits of the blocks that it was merged from

    def enter(self, index: int, nest: LoopNest, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Begins a block."""
        state = self.state
        data = 1 if is_lookup(nest) else max(range(len(inputs)), key=lambda place: state.rank[inputs[place]])
        state.entered[index] = data
        bits = {loop: BITS[name] for name, loops in loops_by_type(nest, data).items() for loop in loops}
        reach = 0
        for value in inputs:
            reach |= state.reach[value]
        self.reads[index], self.before[index] = {self.numbers[value] for value in inputs}, reach
        self.bits[index] = 1 << len(self.bits)
        state.parent[index] = state.of_op[index] = index
        for place, value in enumerate(outputs):
            state.block[value], state.rank[value] = index, index
            state.reach[value] = reach | self.bits[index]
            state.carried[value] = _carried(nest, place, bits)

    def follow(self, index: int, nest: LoopNest, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Adds an operation to the latest block that it reads; an operation that reads none waits for its readers."""
        state = self.state
        ranked = [(state.rank[value], value) for value in inputs if state.block[value] >= 0]
        if not ranked:
            return
        self._meet(nest, inputs)
        rank, latest = max(ranked)
        block = state.of_op[index] = state.find(state.block[latest])
        bits: dict[int, int] = {}
        if is_contraction(nest):
            bits = _shared_loops(state, nest, inputs)
        else:
            for operand, value in enumerate(inputs):
                for loop, more in _loop_bits(state, nest, value, operand).items():
                    bits[loop] = bits.get(loop, 0) | more
        reach = 0
        for value in inputs:
            reach |= state.reach[value]
        for place, value in enumerate(outputs):
            if nest.results[place]:  # a scalar carries no split
                state.block[value], state.rank[value] = block, rank
                state.reach[value], state.carried[value] = reach, _carried(nest, place, bits)

    def _meet(self, nest: LoopNest, inputs: Sequence[int]) -> None:
        """Merges the siblings among the blocks whose values meet in one operation along some loop."""
        state = self.state
        meeting: dict[int, set[int]] = {}
        for operand, value in enumerate(inputs):
            if state.block[value] >= 0:
                loops = _loop_bits(state, nest, value, operand)
                meeting.setdefault(state.find(state.block[value]), set()).update(loops)
        blocks = sorted(meeting)
        for place, one in enumerate(blocks):
            for other in blocks[place + 1 :]:
                if meeting[one] & meeting[other]:
                    self._merge(state.find(one), state.find(other))

    def _merge(self, one: int, other: int) -> None:
        if one == other or not self.reads.get(one, set()) & self.reads.get(other, set()):  # a carry may be ahead
            return
        if self.before[other] & self.bits[one] or self.before[one] & self.bits[other]:
            return
        self.state.parent[other] = one
        self.reads[one] |= self.reads[other]
        self.before[one] |= self.before[other]
        self.bits[one] |= self.bits[other]


def _carried(nest: LoopNest, result: int, bits: Mapping[int, int]) -> Carried:
    """The types that each dim of a result comes from."""
    return tuple(bits.get(leading_loop(nest, dim), 0) for dim in nest.results[result])
