"""`mw.find_blocks`: from a function to its blocks and segments."""

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from meshwright.blocks.backward import place_backward, place_waiting, tie_contractions
from meshwright.blocks.block import Block, Contraction, Segment
from meshwright.blocks.blocks import Blocks
from meshwright.blocks.fingerprint import digest, fingerprint, told_operations
from meshwright.blocks.forward import Grown, grow
from meshwright.blocks.loops import is_contraction, is_lookup, loops_by_type
from meshwright.blocks.numbering import number_values
from meshwright.graph import FORWARD, UPDATE, Graph, trace
from meshwright.graph.repeats import find_runs
from meshwright.rules import LoopNest, loop_nest


def find_blocks(function: Callable[..., Any], *args: Any) -> Blocks:
    """Finds the blocks of a function: the operations whose split follows from one contraction's split.

    A layer of a transformer has four: queries, keys and values with the attention between them; the output projection;
    and the two halves of the feed-forward. Runs of blocks that repeat are segments, which are measured once.

    Args:
        function: An ordinary single-device JAX function: a train step, a forward pass.
        *args: Its arguments: pytrees of arrays or `jax.ShapeDtypeStruct`; nothing is computed.

    Returns:
        The blocks and segments; they print as a table.

    Raises:
        TraceError: JAX could not trace the function.

    Examples:
        >>> import jax, meshwright as mw
        >>> x, w = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((4, 32, 32), "float32")
        >>> def layers(x, ws):
        ...     for w in ws:
        ...         x = jax.nn.relu(x @ w)
        ...     return x
        >>> mw.find_blocks(layers, x, [jax.ShapeDtypeStruct((32, 32), "float32")] * 4)
        Blocks(4 blocks, 1 unique segments of 4)
    """
    start = time.perf_counter()
    return blocks_of(trace(function, *args).graph, start)


def blocks_of(graph: Graph, start: float | None = None) -> Blocks:
    """The blocks of a traced program; ``start`` is when the work on it began."""
    start = time.perf_counter() if start is None else start
    columns = graph.columns
    nest_of = {number: loop_nest(columns.signatures[number]) for number in columns.examples}
    nests = [nest_of[number] for number in columns.signature.tolist()]
    numbers = number_values(graph)
    grown = _grow(graph, nests, numbers)
    body = graph.body.tolist()
    # What follows a block out of its loop, or into another, does not run as often: it belongs with its readers.
    of_op = {index: block for index, block in grown.of_op.items() if body[index] == body[block]}
    waiting = {index for index, op in enumerate(graph.ops) if op.phase == FORWARD and index not in of_op}
    of_op |= place_waiting(graph, of_op, waiting)
    leads = [index for index, nest in enumerate(nests) if is_contraction(nest) or is_lookup(nest)]
    tied = tie_contractions(graph, leads, numbers)
    of_op |= place_backward(graph, frozenset(leads), tied, of_op, numbers)
    of_op |= place_waiting(graph, of_op, [index for index in range(len(nests)) if index not in of_op])
    blocks = _describe(graph, nests, grown.entered, of_op)
    rest = tuple(index for index in range(len(nests)) if index not in of_op)
    segments = find_segments(blocks, body)
    return Blocks(blocks, segments, rest, graph, time.perf_counter() - start)


def _grow(graph: Graph, nests: Sequence[LoopNest], numbers: Sequence[int]) -> Grown:
    """Blocks of the forward pass; with loops a second pass, which knows what the bodies hand on."""
    first = grow(graph, nests, numbers, {})
    carries = {tie.carry: first.block[tie.made] for tie in graph.ties if first.block[tie.made] >= 0}
    return grow(graph, nests, numbers, carries) if carries else first


def _describe(
    graph: Graph, nests: Sequence[LoopNest], entered: dict[int, int], of_op: dict[int, int]
) -> tuple[Block, ...]:
    members: dict[int, list[int]] = {}
    for index in sorted(of_op):
        members.setdefault(of_op[index], []).append(index)
    told = told_operations(graph)
    return tuple(
        _block(number, graph, nests, {block: 0} | entered, members[block], told)
        for number, block in enumerate(sorted(members))
    )


def _block(
    number: int, graph: Graph, nests: Sequence[LoopNest], entered: dict[int, int], members: list[int], told: set[int]
) -> Block:
    ops = graph.ops
    active = [index for index in members if ops[index].phase != UPDATE]
    leads = [index for index in active if is_contraction(nests[index]) or is_lookup(nests[index])]
    return Block(
        number=number,
        operations=tuple(active),
        updates=tuple(index for index in members if ops[index].phase == UPDATE),
        contractions=tuple(_contraction(graph, nests[index], entered, index) for index in leads),
        fingerprint=fingerprint(graph, [index for index in active if index in told], leads),
        trips=ops[leads[0]].trips,
    )


def _contraction(graph: Graph, nest: LoopNest, entered: dict[int, int], index: int) -> Contraction:
    op, data = graph.ops[index], entered.get(index, 0)
    loops = loops_by_type(nest, data)
    sizes = {name: tuple(nest.loops[loop].size for loop in loops_of_type) for name, loops_of_type in loops.items()}
    return Contraction(index, op.label, op.phase, index in entered, data, loops, sizes)


def find_segments(blocks: Sequence[Block], bodies: Sequence[int]) -> tuple[Segment, ...]:
    """The unique segments of a sequence of blocks, in the order of their first occurrence.

    Args:
        blocks: The blocks of a program, in order.
        bodies: For each operation, the number of the loop body that it is in; 0 for none.
    """
    pieces_of: dict[tuple[str, ...], list[tuple[Block, ...]]] = {}
    for body, members in groupby(blocks, key=lambda block: bodies[block.entries[0].operation]):
        for piece in _pieces(tuple(members), body > 0):
            pieces_of.setdefault(tuple(block.fingerprint for block in piece), []).append(piece)
    return tuple(_segment(key, pieces) for key, pieces in pieces_of.items())


def _pieces(blocks: tuple[Block, ...], is_body: bool) -> list[tuple[Block, ...]]:
    """The laps of runs, and single blocks between them; a loop's body without runs is a lap of the loop."""
    names = {block.fingerprint: place for place, block in enumerate(blocks)}
    runs = find_runs([names[block.fingerprint] for block in blocks])
    if is_body and not runs:
        return [blocks]
    pieces, at = [], 0
    for run in runs:
        pieces += [blocks[place : place + 1] for place in range(at, run.start)]
        at = run.start
        while at + run.period <= run.stop:
            pieces.append(blocks[at : at + run.period])
            at += run.period
    return pieces + [blocks[place : place + 1] for place in range(at, len(blocks))]


def _segment(key: tuple[str, ...], pieces: Sequence[tuple[Block, ...]]) -> Segment:
    occurrences = [tuple(sorted(op for block in piece for op in block.operations)) for piece in pieces]
    middle = len(pieces) // 2
    return Segment(
        fingerprint=digest(key),
        blocks=tuple(block.number for block in pieces[middle]),
        operations=occurrences[middle],
        occurrences=tuple(occurrences),
        block_numbers=tuple(tuple(block.number for block in piece) for piece in pieces),
        choices=tuple(len(block.choices) for block in pieces[middle]),
        trips=max(block.trips for block in pieces[middle]),
    )
