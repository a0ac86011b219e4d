"""A step cut into parts: which of its operations run before the parts, for each of them, and after all."""

from collections.abc import Iterable, Sequence

from meshwright.program.program import Program
from meshwright.rules.base import REDUCING
from meshwright.runtime.microbatches.batch_parts import ALIKE, WHOLE, Analysis, TooLate
from meshwright.runtime.microbatches.cut_operations import CannotCut, Cut, Status, is_expensive
from meshwright.runtime.microbatches.part import INDEX, BatchPart, Key, Writing
from meshwright.runtime.microbatches.part_program import PartProgram


class CutStep:
    """A step cut into parts: the operations that run before the parts, for each part, and after them.

    Args:
        program: The step.
        examples: Which of its inputs are part of the batch.
        cut: How the batch is cut. In one part nothing is: operations on the whole batch are then no hindrance.
        waiting: Operations, by position, that run after the parts whatever they read.

    Attributes:
        program: The step's operations.
        cut: How the batch is cut.
        inputs: For each input, 0 where it is cut along its first dim.
        analysis: How the values depend on the batch.
        part: The program of one part.
        shared, sliced: The values that it is given: alike for all parts, and cut.
        made: The values that it is asked for.
        before, after: Operations that run once, before and after the parts.
        contributions, stacked: The values that the parts compute for those after them: to be combined, or joined.
    """

    def __init__(self, program: Program, examples: Sequence[bool], cut: Cut, waiting: Sequence[int] = ()):
        self.program, self.cut = program, cut
        taken = [program.types[v] for v in program.inputs]
        self.inputs: list[Status] = [
            0 if given and aval.shape else ALIKE for given, aval in zip(examples, taken, strict=True)
        ]
        self.analysis = analyse(self.program, self.inputs, cut, waiting)
        self._sort_units()
        self._sort_parts()

    def _sort_units(self) -> None:
        """Finds the units that run after all parts, and the values they need."""
        units, status, outputs = self.program.operations, self.analysis.status, self.program.outputs
        printing = [n for n, unit in enumerate(units) if unit.equation.effects]
        found = self.program.ancestors([*outputs, *(v for n in printing for v in units[n].inputs)])
        self.after = sorted({*printing, *(n for n in found if WHOLE in (status[o] for o in units[n].outputs))})
        self.read_after = {v for n in self.after for v in units[n].inputs} | set(outputs)
        self.contributions = sorted(v for v in self.read_after if status[v] in REDUCING)
        made = self.read_after - set(self.program.inputs)
        self.stacked = sorted(v for v in made if isinstance(status[v], int))

    def _sort_parts(self) -> None:
        """Finds the units that run for each part and before."""
        status, inputs = self.analysis.status, self.program.inputs
        given = {v for v, s in status.items() if s == ALIKE} | set(inputs)
        self.made: list[Key] = [(v, None) for v in (*self.contributions, *self.stacked)]
        derived = PartProgram(self.analysis, self.made, outside=given)
        self.sliced = [(v, d) for v, d in derived.keys if d is not None or isinstance(status[v], int)]
        self.shared = [key for key in derived.keys if key not in self.sliced]
        writing = Writing(self.analysis, [INDEX, *self.shared, *self.sliced])
        self.part = BatchPart(self.program, writing.program, writing.numbers, derived.pieces(writing))
        needed = {v for v, _ in derived.keys} | {v for v in self.read_after if status[v] == ALIKE}
        self.before = self.program.needed(needed)


def analyse(program: Program, inputs: Sequence[Status], cut: Cut, waiting: Iterable[int] = ()) -> Analysis:
    """Analyses again until every operation on examples that reads a value of the whole batch can do so: the value is
    computed beforehand, or the operation waits.

    Raises:
        CannotCut: An operation needs a value that is expensive and known only after the whole batch has run.
    """
    units, early, waiting = program.operations, set[int](), set(waiting)
    last = [n for n, unit in enumerate(units) if unit.equation.effects or is_expensive(unit)]
    cheap = set(range(len(units))) - program.leading_to(last)
    while True:
        try:
            return Analysis(program, inputs, cut, early=early, waiting=waiting)
        except TooLate as error:
            wanted = set(error.values)
            if wanted - early and not any(is_expensive(units[n]) for n in program.ancestors(wanted)):
                early |= wanted
            elif error.number in cheap:
                waiting |= program.depending_on(error.number)
            else:
                message = f"{error.unit} needs a value that is known only after the whole batch has run"
                raise CannotCut(message) from None
