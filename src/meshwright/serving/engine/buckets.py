"""The few shapes that steps are compiled for, and how a planned step is cut into calls of them.

A step of any requests is padded to the next shape: rows of running sequences to 1, 8, 64 and so on, chunks of prompts
to lengths that are four times apart. Shapes with rows and prompts are one call, since both read the same weights.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.serving.models import StepShape
from meshwright.serving.scheduling import Limits, Slice, StepPlan

_FEW_ROWS = 8  # a product with few rows takes about as long as with one
_TOKENS_APART = 4  # padding at most quadruples a chunk of a prompt
LEAST_TOKENS = 32  # fewer cost as much as these: the weights are read
_MOST_PROMPTS = 16


@dataclass(frozen=True)
class PaddedCall:
    """One call of a compiled shape; prompts fill its first chunks, rows stand where `row_of` says."""

    shape: StepShape
    rows: Sequence[Slice]
    prompts: Sequence[Slice]


def length_ladder(chunk: int) -> tuple[int, ...]:
    """The lengths of chunks that are compiled.

    >>> length_ladder(2048), length_ladder(8)
    ((32, 128, 512, 2048), (8,))
    """
    lengths = [chunk]
    while lengths[0] // _TOKENS_APART >= LEAST_TOKENS:
        lengths.insert(0, lengths[0] // _TOKENS_APART)
    return tuple(lengths)


@dataclass(frozen=True)
class Buckets:
    """The shapes of one engine.

    Attributes:
        limits: What the scheduler keeps to.
        contiguous: Whether each slot has a place of its own, so that a row is a slot; otherwise blocks have tables.
        width: Blocks in the table of the longest sequence; 0 where there are none.
        lengths: Lengths of chunks, the shortest first and the longest as long as `limits` allows.
        least_rows: Steps are compiled for no fewer sequences, unless there are fewer slots.
    """

    limits: Limits
    contiguous: bool
    width: int
    lengths: tuple[int, ...]
    least_rows: int = 1

    @property
    def rows(self) -> tuple[int, ...]:
        """Running of steps without prompts."""
        rungs = self.limits.rungs
        return tuple(rung for rung in rungs if rung >= self.least_rows) or rungs[-1:]

    @property
    def mixed_rows(self) -> tuple[int, ...]:
        """Running of steps with prompts, which take longer anyway: any number; or few, or none where slots are read."""
        few = [rows for rows in self.rows[:-1] if rows == _FEW_ROWS]
        return (0, self.rows[-1]) if self.contiguous else (*few, self.rows[-1])

    def together(self, tokens: int) -> int:
        """How many chunks of a length are computed in one call, where there are several."""
        return max(1, min(self.limits.slots, self.limits.chunk // tokens, _MOST_PROMPTS))

    def shapes(self) -> list[StepShape]:
        """All shapes that can occur, the longest to compile first."""
        found = {self._shape(rows, 0, 0, False) for rows in self.rows}
        for rows in self.mixed_rows:
            for tokens in self.lengths:
                for prompts in {1, self.together(tokens)}:
                    if self.contiguous:
                        found.add(self._shape(rows, prompts, tokens, True))
                    if not self.contiguous or prompts == 1:
                        found.add(self._shape(rows, prompts, tokens, False))
        return sorted(found, reverse=True)

    def draws(self) -> list[int]:
        """The numbers of tokens that are drawn together."""
        return sorted({*self.rows, 1, *map(self.together, self.lengths)})

    def _shape(self, rows: int, prompts: int, tokens: int, fresh: bool) -> StepShape:
        return StepShape(rows, prompts, tokens, fresh, self.width)

    def calls(self, plan: StepPlan) -> Iterator[PaddedCall]:
        """The calls that compute a step, in any order."""
        rows = [piece for piece in plan.slices if piece.count == 1]
        groups: dict[tuple[int, bool], list[Slice]] = defaultdict(list)
        for piece in plan.slices:
            if piece.count > 1:
                tokens = next(length for length in self.lengths if length >= piece.count)
                groups[tokens, self.contiguous and piece.start == 0].append(piece)
        if not groups:
            yield PaddedCall(self._shape(self._enough(self.rows, rows), 0, 0, False), rows, ())
        for (tokens, fresh), pieces in groups.items():
            most = 1 if self.contiguous and not fresh else self.together(tokens)
            for first in range(0, len(pieces), most):
                some = pieces[first : first + most]
                prompts = 1 if len(some) == 1 else most
                yield PaddedCall(self._shape(self._enough(self.mixed_rows, rows), prompts, tokens, fresh), rows, some)
                rows = []  # they have been computed

    def _enough(self, ladder: Sequence[int], rows: Sequence[Slice]) -> int:
        wanted = max((piece.slot + 1 for piece in rows), default=0) if self.contiguous else len(rows)
        return next(step for step in ladder if step >= wanted)

    def packed(self, call: PaddedCall) -> np.ndarray:
        """The numbers that a call passes to the device, as one array."""
        vector = call.shape.packed(0)
        rows, prompts = call.shape.unpack(vector)
        for row, piece in zip(self.row_numbers(call), call.rows, strict=True):
            rows.given[row] = -1 if piece.follows else piece.request.tokens(piece.start, 1)[0]
            rows.at[row], rows.slots[row] = piece.start, piece.slot
            if self.width:
                rows.tables[row, : len(piece.block_table)] = piece.block_table
        for number, piece in enumerate(call.prompts):
            prompts.tokens[number, : piece.count] = piece.request.tokens(piece.start, piece.count)
            prompts.starts[number], prompts.counts[number] = piece.start, piece.count
            prompts.slots[number] = piece.slot
            if self.width:
                prompts.tables[number, : len(piece.block_table)] = piece.block_table
        return vector

    def row_numbers(self, call: PaddedCall) -> Sequence[int]:
        """The row of each slice of `call.rows`."""
        return [piece.slot for piece in call.rows] if self.contiguous else range(len(call.rows))
