"""The least memory limit under which a problem has a choice at all: bisection over limits, costs left out."""

import numpy as np

from meshwright.solver.deadline import Deadline
from meshwright.solver.exact.branch_and_bound import Options
from meshwright.solver.exact.resumable import close
from meshwright.solver.model.model import from_problem
from meshwright.solver.problem import validate
from meshwright.solver.problem.check import price
from meshwright.solver.problem.problem import IMPOSSIBLE, ChoiceProblem
from meshwright.solver.reductions.simplify import simplify
from meshwright.solver.tuning import TUNING, Tuning


def least_limit(problem: ChoiceProblem, excess: float, deadline: Deadline, tuning: Tuning = TUNING) -> float | None:
    """The least limit that suffices, or a lower bound on it where the time does not suffice.

    Args:
        problem: A problem without a choice under its limit.
        excess: By how much the limit is known to be too low.
        deadline: When to stop.
        tuning: Options.

    Returns:
        The limit, or None where impossible strategies and pairs rule out every choice whatever the limit.
    """
    free = _without_costs(problem)
    found, _ = _fitting(free, np.inf, deadline, tuning)
    if found is None:
        return None if not deadline.is_over else problem.limit + excess
    low, high = problem.limit + excess, price(free, found).peak_usage
    whole = bool((problem.usage == np.floor(problem.usage)).all())
    low = np.ceil(low) if whole else low
    while high - low > (0.5 if whole else 1e-9 * high) and not deadline.is_over:
        middle = np.floor((low + high) / 2) if whole else (low + high) / 2
        found, needed = _fitting(free, middle, deadline, tuning)
        if found is not None:
            high = min(middle, price(free, found).peak_usage)
        elif not deadline.is_over:
            low = max(middle + 1 if whole else middle, middle + needed)
    return float(high) if high - low <= (0.5 if whole else 1e-9 * high) else float(low)


def _fitting(free: ChoiceProblem, limit: float, deadline: Deadline, tuning: Tuning) -> tuple[np.ndarray | None, float]:
    """A choice that fits a limit, or None and by how much the limit is too low at least."""
    simple = simplify(from_problem(free.with_limit(limit)), deadline, tuning)
    if simple.infeasible:
        return None, simple.excess
    closed = close(Options(0.5, tuning=tuning), simple.model, deadline=deadline)
    return (None, 0.0) if closed.choice is None else (simple.expand(closed.choice), 0.0)


def _without_costs(problem: ChoiceProblem) -> ChoiceProblem:
    """The same problem with every possible strategy and pair at cost 0."""
    cost = np.where(problem.cost >= IMPOSSIBLE, np.inf, 0.0)
    matrix = np.where(problem.matrix >= IMPOSSIBLE, np.inf, 0.0)
    edges = validate.Edges(problem.edge_nodes, problem.edge_matrix, problem.matrix_first, matrix)
    rows = validate.MemoryRows(problem.row_node, problem.row_start, problem.row_end, problem.row_first, problem.usage)
    return ChoiceProblem.from_arrays(problem.first, cost, edges, rows, problem.limit)
