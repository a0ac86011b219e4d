"""A priced plan as a choice problem, in plain arrays: costs, edges, memory over time; without graph or JAX.

The planner makes it from a graph (`planner/pricing/formulation.py`); a saved plan carries it along (`plans/records/`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from meshwright.arrays import Floats, Ints
from meshwright.solver.problem.copies import Copied, EdgeKey, Route, Spans
from meshwright.solver.problem.problem import ChoiceProblem

_NONE: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Profile:
    """Bytes on one device at each operation of the graph."""

    bytes_at: Floats

    @property
    def peak_bytes(self) -> int:
        return int(np.ceil(self.bytes_at.max(initial=0)))

    @property
    def peak_at(self) -> int:
        return int(np.argmax(self.bytes_at)) if len(self.bytes_at) else 0


class Usage:
    """Memory as columns, each of one node with its bytes for every strategy, and the spans of time in which it is live.

    Attributes:
        num_steps: Operations in the graph.
        column_class: The node of each column.
        column_bytes: Bytes of each column for every strategy of its node.
        column, start, stop, share: For each span its column, its interval of operations and its share of the bytes.
    """

    def __init__(self, num_steps: int):
        self.num_steps = num_steps
        self.column_class: list[int] = []
        self.column_bytes: list[Floats] = []

    def add(self, which: int, size: Floats) -> int:
        """Adds a column and returns its number."""
        self.column_class.append(which)
        self.column_bytes.append(size)
        return len(self.column_class) - 1

    def take(self, column: Floats | Ints, start: Floats | Ints, stop: Floats | Ints, share: Floats) -> None:
        """Sets the spans of all columns."""
        self.column, self.start, self.stop = (np.asarray(part).astype(np.int64) for part in (column, start, stop))
        self.share = share

    def profile(self, choice: Ints, copies: Spans) -> Profile:
        """Bytes over time under a choice and the copies that resharding makes."""
        chosen = [size[choice[c]] for c, size in zip(self.column_class, self.column_bytes, strict=True)]
        return Profile(np.cumsum(self.change(np.array(chosen)) + copies.change(self.num_steps))[:-1])

    def least(self, costs: Sequence[Floats] | None = None) -> Profile:
        """Bytes over time if every value were split as far as possible: a lower bound for every choice.

        Given the costs of each node's strategies, no choice is meant that takes one of infinite cost.
        """
        owned = zip(self.column_class, self.column_bytes, strict=True)
        sizes = (size if costs is None else size[np.isfinite(costs[which])] for which, size in owned)
        return Profile(np.cumsum(self.change(np.array([size.min() for size in sizes])))[:-1])

    def change(self, chosen: Floats) -> Floats:
        """The change of live bytes at each operation, given the bytes of each column."""
        change: Floats = np.zeros(self.num_steps + 1)
        if len(chosen):
            size = self.share * chosen[self.column]
            change += np.bincount(self.start, size, len(change))
            change -= np.bincount(self.stop, size, len(change))
        return change

    def usage(self, time: int, num_classes: int) -> list[Floats | None]:
        """For each class, the bytes per strategy that its values take at a time; None where it holds nothing then."""
        live = (self.start <= time) & (time < self.stop)
        counts = np.bincount(self.column[live], self.share[live], len(self.column_class))
        found: list[Floats | None] = [None] * num_classes
        for column in np.flatnonzero(counts):
            which = self.column_class[column]
            size = counts[column] * self.column_bytes[column]
            previous = found[which]
            found[which] = size if previous is None else previous + size
        return found


def joined_s(offers: Ints, settling: Floats, takes: Ints) -> Floats:
    """Seconds saved, by strategies of two nodes, where the partial sums of both are reduced together.

    Args:
        offers: The layout of the first one's partial sum, as a number; 0 where there is none.
        settling: Seconds to reduce it separately.
        takes: The layout of the second one's partial sum; the two can be added if their layouts are equal.
    """
    alike = (offers[:, None] == takes[None, :]) & (offers[:, None] > 0)
    return np.where(alike, settling[:, None], 0.0)


def choice_problem(
    copies: Sequence[float],
    node_costs: Sequence[Floats],
    edge_matrices: Mapping[EdgeKey, tuple[float, Floats]],
    memory: Usage,
    times: Mapping[int, float],
    limit: float | None,
    routes: Mapping[EdgeKey, Route] = _NONE,
    byte_prices: Mapping[int, float] = _NONE,
    copied: Mapping[EdgeKey, Copied] = _NONE,
) -> ChoiceProblem:
    """A folded problem with memory constraints at some times.

    Args:
        copies: How many tied groups each node stands for.
        node_costs: Costs of one of them, for each strategy.
        edge_matrices: For each edge how often it occurs, and its costs.
        memory: The memory over time; used only where there are times.
        times: Operation indices, each with the bytes to be kept free there.
        limit: Bytes allowed; None for no limit.
        routes: For some edges the nodes that they are routed through, which come after all others, in order.
        byte_prices: For some operation indices the price of one byte there, beyond the least bytes of each node.
        copied: The copies along edges; used only where memory has a price.
    """
    edges: dict[tuple[int, int], Floats] = {}
    costs = [n * cost for n, cost in zip(copies, node_costs, strict=True)]

    def join(source: int, reader: int, matrix: Floats) -> None:
        if source == reader:
            costs[source] = costs[source] + np.diagonal(matrix)
            return
        key, part = ((source, reader), matrix) if source < reader else ((reader, source), matrix.T)
        edges[key] = edges[key] + part if key in edges else part

    moments = np.fromiter(byte_prices, np.int64)
    live = [(key, copy, copy.is_live(moments)) for key, copy in copied.items()] if len(moments) else []
    for number, (time, price) in enumerate(byte_prices.items()):
        for which, usage in enumerate(memory.usage(time, len(costs))):
            if usage is not None:  # the least bytes of a node are subtracted: they would hide the costs of time
                costs[which] = costs[which] + price * (usage - usage.min())
        for (source, _, reader, _), copy, is_live in live:
            if is_live[number]:
                join(source, reader, price * copy.bytes_at(time))
    for key, (count, matrix) in edge_matrices.items():
        if key not in routes:
            join(key[0], key[2], count * matrix)
    for node, (key, route) in enumerate(routes.items(), len(costs)):
        count, _ = edge_matrices[key]
        costs.append(np.zeros(len(route.after)))
        join(route.source, node, count * route.before)
        join(node, route.reader, route.after)
        if route.saved is not None:
            join(route.source, route.reader, -count * route.saved)
    for (u, v), matrix in edges.items():
        saved = np.minimum(matrix.min(axis=1), 0.0)
        if saved.any():  # costs of choice problems are never negative
            costs[u], edges[u, v] = costs[u] + saved, matrix - saved[:, None]
    rows = []
    for order, (time, reserve) in enumerate(sorted(times.items())):
        held = [*memory.usage(time, len(node_costs)), *(route.usage[order] for route in routes.values())]
        rows += [(which, order, order + 1, usage) for which, usage in enumerate(held) if usage is not None]
        if reserve > 0:
            rows.append((0, order, order + 1, np.full(len(costs[0]), reserve)))
    return ChoiceProblem.from_rows(costs, [(u, v, m) for (u, v), m in edges.items()], rows, limit)
