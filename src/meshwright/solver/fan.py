"""Duals of one model at several prices of memory, which together rule out more than any of them.

What is decided in a part of a choice leaves other memory for the rest than the best dual reckons with. A row of an
elimination that saves memory at one time and wastes it at another is ruled out by the dual that knows the difference;
of one time only, by several prices.
"""

from collections import deque

import numpy as np

from meshwright.solver.dual import Dual, at_prices, carried

_SCALES = (0.5, 0.8, 1.3, 2.0)
_DEAREST = 4  # times whose prices are changed one by one
_CHANGES = (0.5, 2.0)
_OTHERS = 4  # most duals at prices that were best elsewhere,
_APART = 0.02  # and how far they are from all others at least, as a part of what all memory is worth
_REMEMBERED = 100


class Fan:
    """Makes such duals for one part of a model after another."""

    def __init__(self) -> None:
        self.seen: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=_REMEMBERED)

    def note(self, dual: Dual) -> None:
        """Remembers the prices at which a part has its best bound."""
        if dual.prices.any():
            self.seen.appendleft((dual.model.when, dual.prices.copy()))

    def around(self, dual: Dual, deadline: float) -> list[Dual]:
        """The dual at its best; others with each of its dearest times cheaper and dearer; and at other parts' prices.

        Those of parts that differ most come first.
        """
        dual.restore()
        worth = dual.prices * dual.model.cap
        dearest = [time for time in np.argsort(-worth, kind="stable")[:_DEAREST] if worth[time] > 0]
        if len(dearest) < 2:
            changes = [(slice(None), scale) for scale in _SCALES if dearest]
        else:
            changes = [(time, scale) for time in dearest for scale in _CHANGES]
        tried = [dual.prices.copy()]
        for times, scale in changes:
            tried.append(dual.prices.copy())
            tried[-1][times] *= scale
        tried += self._others(np.array(tried), dual)
        return [dual, *(at_prices(dual, prices, deadline) for prices in tried[1:])]

    def _others(self, tried: np.ndarray, dual: Dual) -> list[np.ndarray]:
        when, cap = dual.model.when, dual.model.cap
        seen = np.array([carried(prices, times, when) for times, prices in self.seen])
        found: list[np.ndarray] = []
        if not len(seen):
            return found
        apart = (np.abs(seen[:, None] - tried) * cap).sum(axis=2).min(axis=1)
        while len(found) < _OTHERS and apart.max() > _APART * float(dual.prices @ cap):
            found.append(seen[np.argmax(apart)])
            apart = np.minimum(apart, (np.abs(seen - found[-1]) * cap).sum(axis=1))
        return found
