"""Which rows the integers of a program look up: how long a look-up or a scatter takes depends on how often they repeat.

Where the user gave arrays, their own integers are used (`Traced.given`), and what follows from these alone is computed:
a part of a program looks up what the whole of it does. Elsewhere integers are drawn over the rows of
the tables that they look up, found by walking from each look-up back to the values that its indices come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from meshwright.graph import Traced
from meshwright.graph.graph import Graph
from meshwright.program.program import Program
from meshwright.rules.families.gathering import SCATTERS

_MOST_COMPUTED = 2**26  # elements of a value on the way from the user's integers to what a part of a program reads
_SCATTERS = {*SCATTERS, *(name.replace("-", "_") for name in SCATTERS)}


@dataclass(frozen=True)
class Indices:
    """What the integers among a program's arguments are, by the number of the argument.

    Attributes:
        rows: The number of rows that they choose from, where they look anything up.
        given: The user's own, as in `Traced`.
    """

    rows: Mapping[int, int]
    given: Mapping[int, np.ndarray]

    @classmethod
    def of(cls, traced: Traced) -> "Indices":
        """Those of a traced program."""
        rows = looked_up(traced.graph)
        return cls({n: rows[value] for n, value in enumerate(traced.graph.inputs) if value in rows}, traced.given)

    def rows_of(self, program: Program, value: int | None, otherwise: int) -> int:
        """The rows that a value of a program chooses from, if it is an argument that looks anything up."""
        if value is None or value not in program.inputs:
            return otherwise
        return self.rows.get(program.inputs.index(value), otherwise)

    def follow(self, program: Program, value: int) -> np.ndarray | None:
        """A value of a program that has these arguments, if it follows from the user's integers and constants alone."""
        values = program.constants | {program.inputs[number]: array for number, array in self.given.items()}
        operations = program.needed([value])
        made = {v for op in operations for v in op.outputs}
        read = {value, *(v for op in operations for v in op.inputs)} - made
        if not read <= values.keys() or any(prod(program.types[v].shape) > _MOST_COMPUTED for v in made):
            return None
        program.run_some(operations, values)
        return np.asarray(values[value])


def looked_up(graph: Graph) -> Mapping[int, int]:
    """For each value that holds indices, the number of rows that they choose from: the most of all its look-ups."""
    rows: dict[int, int] = {}
    for op in reversed(graph.ops):
        kinds = op.signature.operands
        chosen = max((rows.get(value, 0) for value in op.outputs), default=0)
        if op.primitive == "gather" or op.primitive in _SCATTERS:
            _mark(rows, op.inputs[1], _rows_of(op.signature.params["dimension_numbers"], kinds[0].shape))
        elif chosen:
            # What is added to or chosen instead of a negative index, and what sorts or joins indices, hands them on.
            for value, kind in zip(op.inputs, kinds, strict=True):
                if "int" in kind.dtype and kind.shape:
                    _mark(rows, value, chosen)
    return rows


def _rows_of(numbers: Any, table: tuple[int, ...]) -> int:
    is_gather = hasattr(numbers, "start_index_map")
    dims = numbers.start_index_map if is_gather else numbers.scatter_dims_to_operand_dims
    return max((table[d] for d in dims), default=0)


def _mark(rows: dict[int, int], value: int, count: int) -> None:
    if count > rows.get(value, 0):
        rows[value] = count
