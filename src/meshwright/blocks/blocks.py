"""What `find_blocks` returns: the blocks of a program and its segments, which print as a table."""

from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType

from meshwright.blocks.block import Block, Segment
from meshwright.console import Printed, bare_table
from meshwright.graph import FORWARD, Graph
from meshwright.units import format_seconds

_MOST_LIKE = 3  # occurrences that a line names


@dataclass(frozen=True, repr=False)
class Blocks(Printed):
    """The blocks of a program and its segments.

    Attributes:
        blocks: All blocks, in program order.
        segments: The unique segments, in the order of their first occurrence.
        rest: Indices of the operations that belong to no block: what does not depend on any contraction.
        graph: The traced program that the indices refer to.
        seconds: How long it took to find them, tracing included.
    """

    blocks: tuple[Block, ...]
    segments: tuple[Segment, ...]
    rest: tuple[int, ...]
    graph: Graph = field(repr=False)
    seconds: float = 0.0

    def __repr__(self) -> str:
        runs = sum(len(s.occurrences) for s in self.segments)
        return f"Blocks({len(self.blocks)} blocks, {len(self.segments)} unique segments of {runs})"

    def __rich__(self) -> RenderableType:
        return blocks_view(self)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "blocks": [block.to_json() for block in self.blocks],
            "segments": [segment.to_json() for segment in self.segments],
            "seconds": self.seconds,
        }


def blocks_view(found: Blocks) -> RenderableType:
    """All there is to see: the blocks of every unique segment, and the sequence of segments."""
    of_loops, counts = ("contractions", "their loops"), ("choices", "operations", "backward")
    table = bare_table("segment", "block", *of_loops, *counts, right=("block", *counts))
    for place, segment in enumerate(found.segments):
        for nth, number in enumerate(segment.blocks):
            name = f"{place} {segment.fingerprint[:8]}" if nth == 0 else ""
            for row in block_rows(found.blocks[number]):
                table.add_row(name, *row)
                name = ""
    head = f"{found!r}, found in {format_seconds(found.seconds)}"
    lines = (f"segment {place}: {line}" for place, line in enumerate(sequence_lines(found)))
    return Group(head, "", table, "", *lines)


def block_rows(block: Block) -> list[tuple[str, str, str, str, str, str]]:
    """A row for each kind of contraction in a block's forward pass; the first one tells of the whole block."""
    forward = [c for c in block.contractions if c.phase == FORWARD] or list(block.contractions)
    kinds: dict[tuple[str, str, bool], int] = {}
    for c in forward:
        loops = ", ".join(f"{name} {'×'.join(map(str, c.sizes[name]))}" for name in c.choices)
        kinds[c.name, loops, c.enters] = kinds.get((c.name, loops, c.enters), 0) + 1
    rows = []
    for (name, loops, enters), count in kinds.items():
        choices = "" if enters else "follows"
        rows.append(("", name + (f" ×{count}" if count > 1 else ""), loops, choices, "", ""))
    counts = str(len(block.choices)), str(len(block.operations)), str(len(block.contractions) - len(forward))
    rows[0] = (str(block.number), *rows[0][1:3], *counts)
    return rows


def sequence_lines(found: Blocks) -> list[str]:
    """For every unique segment, where it occurs and how large its search space is."""
    return [_sequence_line(segment) for segment in found.segments]


def _sequence_line(segment: Segment) -> str:
    first, *others = segment.block_numbers
    trips = f", {segment.trips:g} trips each" if segment.trips > 1 else ""
    text = f"{_named(first)}, search space {segment.space} = {segment.num_combinations}{trips}"
    return f"{text}; {likeness(segment)}" if others else text


def likeness(segment: Segment) -> str:
    """Which blocks repeat others: ``blocks 14–22 like 0–8``."""
    first, *others = segment.block_numbers
    shown = ", ".join(_range(numbers) for numbers in others[:_MOST_LIKE])
    more = f" and {len(others) - _MOST_LIKE} more" if len(others) > _MOST_LIKE else ""
    plural = "blocks" if len(others) > 1 or len(first) > 1 else "block"
    return f"{plural} {shown}{more} like {_range(first)}"


def _named(numbers: tuple[int, ...]) -> str:
    return f"block{'s' * (len(numbers) > 1)} {_range(numbers)}"


def _range(numbers: tuple[int, ...]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
