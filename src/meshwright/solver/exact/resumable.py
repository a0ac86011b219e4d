"""A branch and bound that can be resumed: a first bound and incumbent, then all that a `Closer` finds in its time.

A solve may be left for another that promises more, and resumed later from where it was.
"""

import sys
from dataclasses import replace

import numpy as np

from meshwright.solver.bounds.dual import Dual
from meshwright.solver.bounds.memory_prices import climb_prices
from meshwright.solver.deadline import NEVER, Deadline
from meshwright.solver.exact.branch_and_bound import Closer, Options
from meshwright.solver.exact.subproblem import Closed, decoded_found
from meshwright.solver.model.choice import cost_of
from meshwright.solver.model.decision_order import decision_order, permuted
from meshwright.solver.model.model import Model


def close(
    options: Options,
    model: Model,
    cutoff: float = np.inf,
    prices: np.ndarray | None = None,
    known: np.ndarray | None = None,
    deadline: Deadline = NEVER,
) -> Closed:
    """Finds the cheapest choice below the cutoff, or proves that there is none (then bound = cutoff).

    Args:
        options: What is wanted.
        model: The model.
        cutoff: Choices that cost as much do not matter.
        prices: Prices of memory to begin with.
        known: A choice that costs the cutoff, to begin with where nothing cheaper is soon found.
        deadline: When to stop.
    """
    return Closing(options, model, cutoff, prices, known).go_on(deadline)


class Closing:
    """A model on the way to its cheapest choice, which may be left and resumed.

    Args:
        options, model, cutoff, prices, known: As in `close`.
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
        self._closer, self._model, self._cutoff, self._known = Closer(options), model, cutoff, known
        self._offset = offset
        self._order = decision_order(model)
        self._dual = Dual(permuted(model, self._order), prices=prices)
        self._found: Closed | None = None
        self._seconds = 0.0

    def go_on(self, deadline: Deadline = NEVER, gap: float = 0.0, goal: float = np.inf) -> Closed:
        """What `close` finds, from where it was left.

        Args:
            deadline: When to stop.
            gap: The gap that suffices, as a part of the bound.
            goal: A bound at which to stop, whatever was found.
        """
        model, dual, closer, cutoff = self._model, self._dual, self._closer, self._cutoff
        if model.num_nodes == 0:
            return Closed(np.zeros(0, dtype=np.int64), 0.0, 0.0) if cutoff > 0 else Closed(None, np.inf, cutoff)
        begun, closer.deadline = deadline.now - self._seconds, deadline
        effort, tolerance = closer.effort, closer.options.tolerance
        effort.coarse |= effort.cut
        found = self._found or self._begin(gap)
        effort.slack = slack = self._slack(gap)
        found = closer.below(dual, found, cutoff, goal)
        if slack > tolerance and found.cost - slack <= found.bound < min(found.cost, goal):
            effort.slack = tolerance
            closer.deadline = deadline.within(closer.tuning.extra_time * (deadline.now - begun))
            found = closer.below(dual, found, cutoff, goal)
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
        model, dual, closer, cutoff = self._model, self._dual, self._closer, self._cutoff
        tuning, effort = closer.tuning, closer.effort
        dual.converge(sys.maxsize, tuning.first_goal, closer.deadline)
        if len(model.cap):
            reach = tuning.price_reach * abs(dual.bound)
            climb_prices(dual, reach, tuning.price_sweeps, cutoff, closer.deadline, tuning)
        effort.slack = self._slack(gap)
        effort.coarse = len(model.cap) > 0
        start = decoded_found(dual, cutoff)
        if start.choice is None and self._known is not None:
            start = replace(start, choice=self._known[self._order], cost=cost_of(model, self._known))
        return closer.mixed(dual, start, cutoff)

    def _slack(self, gap: float) -> float:
        return max(self._closer.options.tolerance, gap * abs(self._dual.bound + self._offset))
