"""Which rows the integers of a program look up: how long a look-up or a scatter takes depends on how often they repeat.

Where the user gave arrays, their own integers are used (`Traced.given`). Elsewhere integers are drawn over the rows of
the tables that they look up, found by walking from each look-up back to the values that its indices come from.
"""

from collections.abc import Mapping
from typing import Any

from meshwright.graph.graph import Graph
from meshwright.rules.gathering import SCATTERS

_SCATTERS = {*SCATTERS, *(name.replace("-", "_") for name in SCATTERS)}


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
