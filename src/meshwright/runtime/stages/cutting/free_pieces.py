"""Pieces that depend on no examples, which every pass can run for itself: masks, positions, random bits of the part."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from meshwright.runtime.microbatches.batch_parts import ALIKE
from meshwright.runtime.microbatches.cut_operations import is_expensive
from meshwright.runtime.microbatches.cut_step import CutStep
from meshwright.runtime.microbatches.part import Key, Piece

_DRAWS = ("random_bits", "random_gamma", "threefry2x32")


class Free(NamedTuple):
    """A piece that every pass can run for itself.

    Attributes:
        number: Its place in the part's program.
        piece: The piece.
        is_drawn: Whether it depends on random bits.
    """

    number: int
    piece: Piece
    is_drawn: bool


@lru_cache(maxsize=64)
def free_pieces(step: CutStep) -> dict[Key, Free]:
    """The values that depend on arguments alone that are the same for all parts, by the pieces that compute them."""
    program = step.program
    given = {key for key in step.shared if key[0] not in program.inputs or not program.types[key[0]].shape}
    given |= {key for key in step.sliced if key[1] is not None and key[0] not in program.inputs}
    found: dict[Key, Free] = {}
    for number, one in enumerate(step.part.pieces):
        if is_expensive(one.unit):
            continue
        if all(key in given or key in found or key[0] in program.constants for key in one.ins):
            drawn = one.unit.name in _DRAWS or any(found[key].is_drawn for key in one.ins if key in found)
            found.update(dict.fromkeys(one.outs, Free(number, one, drawn)))
    return found


def fused_pieces(step: CutStep, is_held: Sequence[bool]) -> dict[Key, Free]:
    """The values, the same for all parts, that XLA would fuse into their readers, by the pieces that compute them.

    A scale that is broadcast over pixels would take as much memory as an activation if it were computed once a step.

    Args:
        step: The step cut into parts.
        is_held: For each unit, whether its results are kept.
    """
    program, status, found = step.program, step.analysis.status, dict[Key, Free]()
    for number, unit in enumerate(program.operations):
        is_drawn = unit.name in _DRAWS or unit.name.startswith("random_")
        if is_held[number] or is_drawn or unit.equation.effects or unit.regions or is_expensive(unit):
            continue
        if all(
            status.get(v) == ALIKE for v in (*unit.inputs, *unit.outputs)
        ):  # not what is known early, of all examples
            piece = step.part.whole(unit)
            free = Free(number - len(program.operations), piece, is_drawn=False)  # before all pieces of the part
            found.update(dict.fromkeys(piece.outs, free))
    return found
