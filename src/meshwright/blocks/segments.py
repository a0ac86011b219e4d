"""Segments: the tandem repeats in the sequence of blocks, the bodies of loops, and every other block alone."""

from collections.abc import Sequence
from itertools import groupby

from meshwright.blocks.block import Block, Segment
from meshwright.blocks.fingerprint import digest
from meshwright.graph.repeats import find_runs


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
