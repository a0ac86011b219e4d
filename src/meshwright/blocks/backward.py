"""Ties the operations of the backward pass and of the update to the blocks of the forward pass, by data flow.

A backward contraction belongs to the forward one with which it shares an operand, and whose result has the shape of
its other operand: ``dX = dY · Wᵀ`` shares W, ``dW = Xᵀ · dY`` shares X. Where several forward contractions share that
operand (queries, keys and values read one X) the cotangent dY decides. Every other operation belongs to the block of
the forward value that it reads (the derivative of an activation reads what the activation read), and where it reads
none, to the block of the value that was computed last.
"""

from collections.abc import Container, Iterable, Sequence

from meshwright.blocks.numbering import depends_on_inputs
from meshwright.graph import BACKWARD, FORWARD, Graph, Op


def tie_contractions(graph: Graph, leads: Sequence[int], numbers: Sequence[int]) -> dict[int, int]:
    """For each contraction of the backward pass, the forward contraction that it is the gradient of, or repeats."""
    ops = graph.ops
    forward = [index for index in leads if ops[index].phase == FORWARD]
    same = {numbers[ops[index].outputs[0]]: index for index in reversed(forward)}
    readers: dict[int, list[int]] = {}
    given = depends_on_inputs(graph)
    for index in forward:  # what depends on no input, such as a mask, is equal in all layers
        for number in {numbers[value] for value in ops[index].inputs if value in given}:
            readers.setdefault(number, []).append(index)
    tied: dict[int, int] = {}
    open_ties: dict[int, list[tuple[int, int]]] = {}
    cotangents: dict[int, int] = {}  # by number, the forward contraction whose result's cotangent it is
    for index in leads:
        op = ops[index]
        if op.phase == FORWARD:
            continue
        repeated = same.get(numbers[op.outputs[0]])
        candidates = [] if repeated is not None else _gradients_of(graph, op, numbers, readers)
        if repeated is not None:
            tied[index] = repeated
        elif len(candidates) == 1:
            tied[index], cotangent = candidates[0]
            cotangents.setdefault(cotangent, tied[index])
        elif candidates:
            open_ties[index] = candidates
    for index, candidates in open_ties.items():
        sources = [source for source, cotangent in candidates if cotangents.get(cotangent) == source]
        tied[index] = sources[0] if sources else candidates[-1][0]
    return tied


def _gradients_of(graph: Graph, op: Op, numbers: Sequence[int], readers: dict[int, list[int]]) -> list[tuple[int, int]]:
    """The forward contractions that a contraction may be a gradient of, each with the cotangent's number.

    Of a kernel with many operands, such as attention, only the one with which it shares most of them is meant.
    """
    shapes = [_extents(graph.types[value].shape) for value in op.inputs]
    cotangents: dict[int, int] = {}
    shared: dict[int, int] = {}
    for place, value in enumerate(op.inputs):
        for source in readers.get(numbers[value], ()):
            shared[source] = shared.get(source, 0) + 1
            extents = _extents(graph.types[graph.ops[source].outputs[0]].shape)
            for other, shape in enumerate(shapes):
                if other != place and shape == extents:
                    cotangents.setdefault(source, numbers[op.inputs[other]])
                    break
    most = max((shared[source] for source in cotangents), default=0)
    return [(source, cotangent) for source, cotangent in cotangents.items() if shared[source] == most]


def _extents(shape: Sequence[int]) -> list[int]:
    """The sizes of a shape, whatever their order."""
    return sorted(size for size in shape if size > 1)


def place_backward(
    graph: Graph, leads: Container[int], tied: dict[int, int], of_op: dict[int, int], numbers: Sequence[int]
) -> dict[int, int]:
    """The block of every operation after the forward pass that reads, directly or not, a value of a block.

    Args:
        graph: The program.
        leads: All contractions; one of the backward pass that is tied to none and reads no block enters its own.
        tied: For contractions of the backward pass, the forward contraction that they are tied to.
        of_op: The blocks of forward operations.
        numbers: The number of each value.
    """
    ops = graph.ops
    maker_block = {value: block for index, block in of_op.items() for value in ops[index].outputs}
    again = _once({(numbers[value], block) for value, block in maker_block.items()})
    home: dict[int, int] = {}  # values of the backward pass and of the update
    block_of: dict[int, int] = {}
    for index, op in enumerate(ops):
        if op.phase == FORWARD:
            continue
        repeated = again.get(numbers[op.outputs[0]], -1)
        source = tied.get(index, -1)
        read = [value for value in op.inputs if graph.types[value].shape]
        residuals = [maker_block[value] if value in maker_block else again.get(numbers[value], -1) for value in read]
        residuals = [block for block in residuals if block >= 0]
        cotangents = [value for value in read if value in home]
        if source >= 0 and source in of_op:
            block = of_op[source]
        elif repeated >= 0:
            block = repeated
        elif residuals:
            block = residuals[-1]
        elif cotangents:
            block = home[max(cotangents)]
        elif index in leads and op.phase == BACKWARD:  # the forward contraction itself was not needed
            block = index
        else:
            continue
        block_of[index] = block
        home.update(dict.fromkeys(op.outputs, block))
    return block_of


def _once(pairs: set[tuple[int, int]]) -> dict[int, int]:
    """Those numbers that belong to one block: masks and tables are equal in all layers."""
    block_of: dict[int, int] = {}
    for number, block in pairs:
        block_of[number] = block if number not in block_of else -1
    return block_of


def place_waiting(graph: Graph, of_op: dict[int, int], indices: Iterable[int]) -> dict[int, int]:
    """Blocks for operations that read no block (casts of weights, masks): that of all their readers, if it is one."""
    readers: list[set[int]] = [set() for _ in range(graph.columns.num_values)]
    block_of: dict[int, int] = {}
    for index, block in of_op.items():
        for value in graph.ops[index].inputs:
            readers[value].add(block)
    for index in sorted(indices, reverse=True):
        op = graph.ops[index]
        blocks = set().union(*(readers[value] for value in op.outputs))
        if len(blocks) == 1:
            block_of[index] = blocks.pop()
            for value in op.inputs:
                readers[value].add(block_of[index])
        else:
            for value in op.inputs:
                readers[value] |= blocks
    return block_of
