"""How a parameter is read: the use of an axis that splits one of its dims."""

from collections.abc import Iterator

import numpy as np

from meshwright.parallelism.axis_uses import looked_up, place_of
from meshwright.parallelism.dim_names import major_loops
from meshwright.plans.records.traced_program import RecordedProgram


def dim_parts(program: RecordedProgram, parameter: int) -> list[str]:
    """For each dim of a parameter, the use of an axis that splits it in the first product with the parameter."""
    rank = len(program.shape(parameter))
    for op, operand in _readers(program, parameter):
        nest = program.nests[int(program.nest[op])]
        if nest.flops > 0 or looked_up(nest):
            parts = [place_of(nest, operand, loop) for loop in major_loops(nest, nest.operands[operand])]
            return ["layer"] * (rank - len(parts)) + parts[:rank]  # a scan reads one layer at a time
    return [""] * rank


def _readers(program: RecordedProgram, parameter: int) -> Iterator[tuple[int, int]]:
    """Operations, with the operand, that read a parameter or a value made from it alone, such as a cast."""
    waiting = [parameter]
    for value in waiting:
        for at in np.flatnonzero(program.reads == value).tolist():
            op = int(np.searchsorted(program.start, at, side="right")) - 1
            yield op, at - int(program.start[op])
            if program.nests[int(program.nest[op])].flops == 0 and set(program.reads_of(op)) == {value}:
                waiting += program.made_by(op)
