"""A branch and bound that can be resumed: a first bound and incumbent, then all that is found in the time.

A solve may be left for another that promises more, and resumed later from where it was.
"""

import sys
from dataclasses import replace

import numpy as np

from meshwright.solver.bounds.dual import Dual
from meshwright.solver.bounds.memory_prices import climb_prices
from meshwright.solver.deadline import NEVER, Deadline
from meshwright.solver.exact.branch_and_bound import BranchAndBound, Options
from meshwright.solver.exact.subproblem import Closed, decoded_found
from meshwright.solver.model.decision_order import decision_order, permuted
from meshwright.solver.model.model import Model, cost_of


def close(
    options: Options,
    model: Model,
    cutoff: float = np.inf,
    prices: np.ndarray | None = None,
    deadline: Deadline = NEVER,
) -> Closed:
    """Finds the cheapest choice below the cutoff, or proves that there is none (then bound = cutoff).

    Args:
        options: What is wanted.
        model: The model.
        cutoff: Choices that cost as much do not matter.
        prices: Prices of memory to begin with.
        deadline: When to stop.
    """
    return ResumableSolve(options, model, cutoff, prices).resume(deadline)


class ResumableSolve:
    """A model on the way to its cheapest choice, which may be left and resumed.

    Args:
        options, model, cutoff, prices: As in `close`.
        known: A choice that costs the cutoff, to begin with where nothing cheaper is soon found.
        offset: What the model leaves out of the cost.
    """

    def __init__(
        self,
        options: Options,
        model: Model,
        cutoff: float = np.inf,
        prices: np.ndarray | None = None,
        known: np.ndarray | None = None,
        offset: float = 0.0,
    ):
        self._search, self._model, self._cutoff, self._known = BranchAndBound(options), model, cutoff, known
        self._offset = offset
        self._order = decision_order(model)
        self._dual = Dual(permuted(model, self._order), prices=prices)
        self._found: Closed | None = None
        self._seconds = 0.0

    def resume(self, deadline: Deadline = NEVER, gap: float = 0.0, goal: float = np.inf) -> Closed:
        """What `close` finds, from where it was left.

        Args:
            deadline: When to stop.
            gap: The gap that suffices, as a part of the bound.
            goal: A bound at which to stop, whatever was found.
        """
        model, dual, search, cutoff = self._model, self._dual, self._search, self._cutoff
        if model.num_nodes == 0:
            return Closed(np.zeros(0, dtype=np.int64), 0.0, 0.0) if cutoff > 0 else Closed(None, np.inf, cutoff)
        begun, search.deadline = deadline.now - self._seconds, deadline
        effort, tolerance = search.effort, search.options.tolerance
        effort.relaxation_first |= effort.relaxation_interrupted
        found = self._found or self._begin(gap)
        effort.slack = slack = self._slack(gap)
        found = search.close_gap(dual, found, cutoff, goal)
        if slack > tolerance and found.cost - slack <= found.bound < min(found.cost, goal):
            effort.slack = tolerance
            search.deadline = deadline.within(search.tuning.extra_time * (deadline.now - begun))
            found = search.close_gap(dual, found, cutoff, goal)
        self._found, self._seconds = found, deadline.now - begun
        if found.choice is None or found.cost >= cutoff:
            return Closed(None, np.inf, found.bound)
        choice = np.empty(model.num_nodes, dtype=np.int64)
        choice[self._order] = found.choice
        return replace(found, choice=choice)

    @property
    def prices(self) -> dict[int, float]:
        """Prices of memory at which the bound is best, by the times' numbers before any was dropped."""
        return dict(zip(self._dual.model.when.tolist(), self._dual.prices.tolist(), strict=True))

    def _begin(self, gap: float) -> Closed:
        """A first bound and, as far as one is found, a first choice."""
        model, dual, search, cutoff = self._model, self._dual, self._search, self._cutoff
        tuning, effort = search.tuning, search.effort
        dual.converge(sys.maxsize, tuning.first_goal, search.deadline)
        if len(model.cap):
            reach = tuning.price_reach * abs(dual.bound)
            climb_prices(dual, reach, tuning.price_sweeps, cutoff, search.deadline, tuning)
        effort.slack = self._slack(gap)
        effort.relaxation_first = len(model.cap) > 0
        start = decoded_found(dual, cutoff)
        if start.choice is None and self._known is not None:
            start = replace(start, choice=self._known[self._order], cost=cost_of(model, self._known))
        return search.mix_minima(dual, start, cutoff)

    def _slack(self, gap: float) -> float:
        return max(self._search.options.tolerance, gap * abs(self._dual.bound + self._offset))
