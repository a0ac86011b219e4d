"""The choice problem as flat arrays: strategies, shared edge matrices, memory rows, one limit."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import ProblemError
from meshwright.solver.problem import contest_json, validate
from meshwright.solver.problem.validate import IMPOSSIBLE as IMPOSSIBLE


class ChoiceProblem:
    """Nodes with strategies, costs and memory over intervals; edges with cost matrices; one memory limit.

    Costs are float64 (whole numbers below 2**53 are exact); `inf` or anything from 1e17 up means impossible. Several
    edges between the same two nodes are allowed and add up; an edge from a node to itself is an error.

    Args:
        costs: One sequence of costs per node, one cost per strategy.
        usages: One sequence of usages per node, as long as its costs; None for a problem without memory.
        intervals: One half-open `(start, end)` per node, in which its usage counts; an empty one never counts.
        edges: `(u, v, matrix)` triples; the matrix is 2-D over (strategy of u, strategy of v) or its flat rows.
            Edges that are given the same array object share its storage.
        limit: Most total usage at any time; None for no limit.

    Attributes (all arrays are read-only):
        first: Strategies of node i are `first[i]:first[i + 1]` of `cost`.
        edge_nodes, edge_matrix: The two ends of every edge, and which matrix of the pool it uses.
        matrix_first, matrix: The pool: matrix m is `matrix[matrix_first[m]:matrix_first[m + 1]]`, row-major.
        row_node, row_start, row_end, row_first, usage: Memory rows: in `[start, end)` row r adds
            `usage[row_first[r] + strategy of row_node[r]]`.

    Examples:
        >>> problem = ChoiceProblem(costs=[[1, 2], [0, 5]], usages=[[4, 1], [3, 3]], intervals=[(0, 2), (1, 3)],
        ...                         edges=[(0, 1, [[9, 0], [0, 9]])], limit=5)
        >>> problem
        ChoiceProblem(2 nodes, 4 strategies, 1 edges, 2 memory rows, limit 5)
    """

    def __init__(self, *, costs, usages=None, intervals=None, edges: Iterable[tuple] = (), limit=None, name: str = ""):
        first, cost = validate.costs(costs)
        rows = validate.contest_rows(first, usages, intervals)
        self._adopt(first, cost, validate.edges(first, edges), rows, validate.limit(limit), name)

    @classmethod
    def from_rows(cls, costs, edges: Iterable[tuple], rows: Iterable[tuple], limit, name: str = "") -> "ChoiceProblem":
        """Builds a problem whose nodes may have any number of memory rows `(node, start, end, usage_vector)`.

        Examples:
            >>> ChoiceProblem.from_rows([[1, 2]], [], [(0, 0, 1, [3, 1]), (0, 4, 5, [1, 2])], limit=2)
            ChoiceProblem(1 nodes, 2 strategies, 0 edges, 2 memory rows, limit 2)
        """
        first, cost = validate.costs(costs)
        self = cls.__new__(cls)
        self._adopt(
            first, cost, validate.edges(first, edges), validate.rows(first, list(rows)), validate.limit(limit), name
        )
        return self

    @classmethod
    def from_arrays(
        cls, first, cost, edges: validate.Edges, rows: validate.MemoryRows, limit: float, name=""
    ) -> "ChoiceProblem":
        """Adopts arrays that are already in the stored form and known to be valid."""
        self = cls.__new__(cls)
        self._adopt(first, cost, edges, rows, limit, name)
        return self

    def _adopt(self, first, cost, edges: validate.Edges, rows: validate.MemoryRows, limit: float, name: str) -> None:
        self.name = name
        self.first: np.ndarray = first
        self.cost: np.ndarray = cost
        self.edge_nodes, self.edge_matrix, self.matrix_first, self.matrix = edges
        self.row_node, self.row_start, self.row_end, self.row_first, self.usage = rows
        self.limit = limit
        for array in (first, cost, *edges, *rows):
            array.flags.writeable = False

    @property
    def num_nodes(self) -> int:
        return len(self.first) - 1

    @property
    def num_edges(self) -> int:
        return len(self.edge_nodes)

    @property
    def num_strategies(self) -> int:
        return len(self.cost)

    def with_limit(self, limit: float | None) -> "ChoiceProblem":
        """The same problem under another memory limit; the arrays are shared."""
        return ChoiceProblem.from_arrays(*self._stored()._replace(limit=validate.limit(limit)))

    @classmethod
    def load(cls, path: str | Path) -> "ChoiceProblem":
        """Reads the contest's JSON, plain or gzipped; a fault is a `ProblemError` that names the element."""
        return cls.from_arrays(*contest_json.load(path))

    def save(self, path: str | Path) -> None:
        """Writes the contest's JSON (gzipped where the name ends in .gz).

        The contest knows one interval per node: every further row becomes a node of its own, without cost, tied to the
        row's node by an edge that allows only equal strategies. Such nodes follow the problem's own nodes.
        """
        contest_json.save(self._stored(), path)

    def __repr__(self) -> str:
        limit = "none" if np.isinf(self.limit) else f"{self.limit:.17g}"
        return (
            f"ChoiceProblem({self.num_nodes} nodes, {self.num_strategies} strategies, {self.num_edges} edges, "
            f"{len(self.row_node)} memory rows, limit {limit})"
        )

    def __reduce__(self) -> tuple[Callable[..., "ChoiceProblem"], tuple[Any, ...]]:
        return _rebuild, tuple(self._stored())

    def _stored(self) -> validate.Stored:
        edges = validate.Edges(self.edge_nodes, self.edge_matrix, self.matrix_first, self.matrix)
        rows = validate.MemoryRows(self.row_node, self.row_start, self.row_end, self.row_first, self.usage)
        return validate.Stored(self.first, self.cost, edges, rows, self.limit, self.name)


def _rebuild(*parts) -> ChoiceProblem:
    return ChoiceProblem.from_arrays(*parts)


__all__ = ["IMPOSSIBLE", "ChoiceProblem", "ProblemError"]
