"""Duals of one model at several prices of memory, which together rule out more than any of them.

A partial choice may leave the rest more or less memory than the prices of the best dual assume. Several duals rule out
more: a row of an elimination that saves memory at one time and wastes it at another is ruled out by a dual with other
prices at these times, and where one time alone binds, by duals with a higher or lower price.
"""

from collections import deque
from collections.abc import Iterator
from itertools import permutations

import numpy as np

from meshwright.solver.bounds.dual import Dual, at_prices, carried
from meshwright.solver.deadline import Deadline
from meshwright.solver.tuning import TUNING, Tuning


class Fan:
    """Makes these duals for one subproblem after another."""

    def __init__(self, tuning: Tuning = TUNING) -> None:
        self.tuning = tuning
        self.seen: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=100)  # so that comparing them stays quick

    def note(self, dual: Dual) -> None:
        """Records the prices at which a subproblem has its best bound."""
        if dual.prices.any():
            self.seen.appendleft((dual.model.when, dual.prices.copy()))

    def around(self, dual: Dual, deadline: Deadline) -> list[Dual]:
        """The best dual; duals with the same total worth of memory at other times; and duals at the prices of others.

        The prices of subproblems that differ most come first.
        """
        dual.restore()
        tried = [dual.prices.copy(), *_changed(dual, self.tuning)]
        tried += self._others(np.array(tried), dual)
        return [dual, *(at_prices(dual, prices, deadline) for prices in tried[1:])]

    def _others(self, tried: np.ndarray, dual: Dual) -> list[np.ndarray]:
        when, cap = dual.model.when, dual.model.cap
        seen = np.array([carried(prices, times, when) for times, prices in self.seen])
        found: list[np.ndarray] = []
        if not len(seen):
            return found
        apart = (np.abs(seen[:, None] - tried) * cap).sum(axis=2).min(axis=1)
        while len(found) < self.tuning.fan and apart.max() > 0.0:
            found.append(seen[np.argmax(apart)])
            apart = np.minimum(apart, (np.abs(seen - found[-1]) * cap).sum(axis=1))
        return found


def _changed(dual: Dual, tuning: Tuning) -> Iterator[np.ndarray]:
    """Prices at which what memory is worth in all lies at one time, or some of it at another; of one time, scaled."""
    cap, worth = dual.model.cap, dual.prices * dual.model.cap
    binding = [time for time in np.argsort(-worth, kind="stable")[: tuning.fan] if worth[time] > 0]
    if len(binding) == 1:
        yield from (scale * dual.prices for scale in tuning.price_scales)
        return
    for time in binding:
        prices = np.zeros(len(cap))
        prices[time] = worth.sum() / cap[time]
        yield prices
    part = 1.0 if len(binding) > 2 else 0.5  # all of it, unless that is what the loop above has tried
    for giver, taker in permutations(binding, 2):
        prices = dual.prices.copy()
        prices[taker] += part * worth[giver] / cap[taker]
        prices[giver] *= 1.0 - part
        yield prices
