"""A step whose batch is one part: nothing is cut, so operations on the whole batch are no hindrance."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.program.program import Program
from meshwright.runtime.microbatches.batch_parts import ALIKE
from meshwright.runtime.microbatches.cut_operations import Cut, Status
from meshwright.runtime.microbatches.part import INDEX, INDEX_TYPE, BatchPart, Key, Piece


@dataclass(frozen=True)
class _Statuses:
    status: dict[int, Status]


class OnePart:
    """A step with the attributes of one that is cut (`CutStep`), of which there is only one part.

    Args:
        program: The step's operations.
        examples: Which inputs are part of the batch.
        is_update: Which operations run after the part, once a step.
    """

    def __init__(self, program: Program, examples: Sequence[bool], is_update: Sequence[bool]):
        self.program, self.cut = program, Cut(1, 1)
        types = program.types
        self.inputs: list[Status] = [0 if given and types[i].shape else ALIKE for i, given in enumerate(examples)]
        part = {i for i, status in enumerate(self.inputs) if status != ALIKE}
        made: set[int] = set()
        whole = program.copy()
        numbers: dict[Key, int] = {(v, None): v for v in range(len(types))}
        numbers[INDEX] = whole.add_value(INDEX_TYPE)
        self.part = BatchPart(program, whole, numbers)
        pieces = self.part.pieces
        for unit, after in zip(program.operations, is_update, strict=True):
            if not (after or unit.equation.effects or part.isdisjoint(unit.inputs)):
                pieces.append(Piece.whole(unit))
                part.update(unit.outputs)
                made.update(unit.outputs)
        own = {id(piece.unit) for piece in pieces}
        later = [unit for unit in program.operations if id(unit) not in own]
        read = {v for unit in later for v in unit.inputs} | set(program.outputs)
        self.contributions: list[int] = []
        self.stacked = sorted(made & read)
        self.analysis = _Statuses({v: 0 if v in part else ALIKE for v in range(len(types))})
        given = sorted({v for piece in pieces for v, _ in piece.ins} - made - program.constants.keys())
        self.shared: list[Key] = [(v, None) for v in given if v not in part]
        self.sliced: list[Key] = [(v, None) for v in given if v in part]
