"""Re-prices an answer from the problem alone, in plain numpy; shares no code with the solver it judges."""

from dataclasses import dataclass

import numpy as np

from meshwright.solver.problem.problem import ChoiceProblem

_IMPOSSIBLE = 1e17


@dataclass(frozen=True)
class Price:
    """What a choice really costs.

    Attributes:
        cost: Node plus edge costs; inf where an impossible strategy or pair was chosen.
        peak_usage: The most memory in use at any time.
        legal: Whether every strategy exists, nothing impossible was chosen, and the peak is within the limit.
        fault: Why it is not legal, or an empty string.
    """

    cost: float
    peak_usage: float
    legal: bool
    fault: str = ""


def price(problem: ChoiceProblem, choice) -> Price:
    """Prices one choice.

    >>> problem = ChoiceProblem(costs=[[1, 2], [0, 5]], edges=[(0, 1, [[9, 0], [0, 9]])])
    >>> price(problem, [1, 0])
    Price(cost=2.0, peak_usage=0.0, legal=True, fault='')
    """
    picked = np.asarray(choice)
    if picked.shape != (problem.num_nodes,):
        return Price(np.inf, np.inf, False, f"{picked.shape} choices for {problem.num_nodes} nodes")
    sizes = np.diff(problem.first)
    wrong = np.flatnonzero((picked < 0) | (picked >= sizes))
    if wrong.size:
        node = int(wrong[0])
        return Price(np.inf, np.inf, False, f"node {node} has no strategy {int(picked[node])}")
    picked = picked.astype(np.int64)
    parts = [problem.cost[problem.first[:-1] + picked]]
    if problem.num_edges:
        u, v = problem.edge_nodes[:, 0], problem.edge_nodes[:, 1]
        parts.append(problem.matrix[problem.matrix_first[problem.edge_matrix] + picked[u] * sizes[v] + picked[v]])
    terms = np.concatenate(parts)
    peak = _peak(problem, picked)
    if (terms >= _IMPOSSIBLE).any():
        return Price(np.inf, peak, False, "an impossible strategy or pair was chosen")
    # Plain summation of whole numbers below 2**53 is exact; pairwise summation keeps the error of others below 1e-15.
    cost = float(terms.sum())
    # A limit in float bytes may be met to the last bit: allow rounding, never a whole unit of a whole-number limit.
    if peak > problem.limit * (1 + 1e-12):
        return Price(cost, peak, False, f"peak usage {peak:.17g} exceeds the limit {problem.limit:.17g}")
    return Price(cost, peak, True)


def _peak(problem: ChoiceProblem, picked: np.ndarray) -> float:
    """Most memory at any time: running sum over starts (plus) and ends (minus), ends first at equal times."""
    live = problem.row_end > problem.row_start
    if not live.any():
        return 0.0
    used = problem.usage[problem.row_first[live] + picked[problem.row_node[live]]]
    times = np.concatenate([problem.row_start[live], problem.row_end[live]])
    change = np.concatenate([used, -used])
    moments, place = np.unique(times, return_inverse=True)
    return float(max(0.0, np.cumsum(np.bincount(place, weights=change, minlength=len(moments))).max()))
