"""Certified lower bounds on a problem's cost, without solving it."""

import numpy as np

from meshwright.solver.problem.problem import ChoiceProblem


def lower_bound(
    problem: ChoiceProblem, iterations: int = 100, seconds: float = 10.0, target: float | None = None
) -> float:
    """A bound that no choice within the memory limit can undercut, by message passing on the problem as it is.

    Nodes are swept in the given order, so a chain of layers converges within few sweeps. Edges that share a matrix
    share its storage, so unfolded problems with thousands of equal layers stay small.

    Args:
        problem: The problem to bound.
        iterations: Most sweeps; fewer are made once they gain nothing.
        seconds: Wall-clock limit.
        target: A known cost: the sweeps stop once the bound is within 1e-9 of it. With a memory limit it also sets the
            step length of the prices.

    >>> round(lower_bound(ChoiceProblem(costs=[[1, 2], [0, 5]], edges=[(0, 1, [[9, 0], [0, 9]])])), 6)
    2.0
    """
    from meshwright.solver.bounds.dual import Dual, ascend_prices
    from meshwright.solver.deadline import Deadline
    from meshwright.solver.model.model import from_problem

    deadline = Deadline.after(seconds)
    model = from_problem(problem)
    ceiling = _ceiling(model)
    dual = Dual(model._replace(cost=np.minimum(model.cost, ceiling), mat=np.minimum(model.mat, ceiling)))
    goal = float("inf") if target is None else target - 1e-9 * abs(target)
    dual.converge(iterations, 1e-9, deadline, goal)
    if len(model.cap) and dual.bound < goal:
        ascend_prices(dual, float("inf") if target is None else target, iterations, deadline)
    if dual.bound >= ceiling:
        return float("inf")
    # Sums of thousands of floats may round upwards: subtract more than the rounding can add.
    return dual.bound - 1e-12 * abs(dual.bound)


def _ceiling(model) -> float:
    """More than any legal choice costs: what is impossible may be priced so, which keeps the messages finite."""
    cost = np.where(np.isinf(model.cost), -np.inf, model.cost)
    total = float(np.maximum(np.maximum.reduceat(cost, model.off[:-1]), 0.0).sum())
    if len(model.eu):
        places, index = np.unique(model.eoff, return_inverse=True)
        largest = np.maximum.reduceat(np.where(np.isinf(model.mat), 0.0, model.mat), places)
        total += float(np.maximum(largest, 0.0)[index].sum())
    return 2.0 * total + 1.0
