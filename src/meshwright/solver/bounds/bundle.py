"""Where a concave function of prices is highest, from its values and slopes at a few of them: a proximal bundle method.

Each evaluation gives a cut: a linear upper bound on the function at all other prices. The minimum of all cuts models
the function; the next prices maximise the model less a penalty for the distance from the best prices so far.
"""

import numpy as np

from meshwright.jit import kernel, pause
from meshwright.solver.tuning import TUNING, Tuning


class Bundle:
    """The cuts of a bound at some prices of memory.

    A price is given as the worth of the whole cap of a time, a slope as the excess over that cap, relative to the cap.

    Attributes:
        center: The best prices so far.
        best: The bound there.
        promised: By how much the bound is higher at the prices that were last asked for, according to the model.
        step: The step length: the next prices are this times the slope away from the center.
    """

    def __init__(self, center: np.ndarray, value: float, slope: np.ndarray, step: float, tuning: Tuning = TUNING):
        self.tuning = tuning
        self.center, self.best, self.step, self.promised = center, value, step, 0.0
        self.slopes, self.bases = [slope], [value - float(slope @ center)]

    def ask(self) -> np.ndarray:
        """The next prices.

        A cut below the best value at the center is raised to it: it was made when the messages were worse.
        """
        slopes = np.array(self.slopes)
        here = np.maximum(np.array(self.bases) + slopes @ self.center, self.best)
        rounds = 2 * len(slopes) ** 2  # each pair of cuts exchanges weights about four times
        prices = highest(slopes, here, self.center, self.step, rounds)
        self.promised = float((here + slopes @ (prices - self.center)).min()) - self.best
        return prices

    def tell(self, prices: np.ndarray, value: float, slope: np.ndarray) -> bool:
        """Adds the cut at the prices that were last asked for; returns whether they are better."""
        cuts = self.tuning.bundle_cuts
        self.slopes, self.bases = [*self.slopes, slope][-cuts:], [*self.bases, value - float(slope @ prices)][-cuts:]
        gained = value - self.best
        self.step *= 2.0 if gained > 0.0 else 0.5
        if gained > 0.0:
            self.center, self.best = prices, value
        return gained > 0.0


@kernel(pauses=True)
def highest(slopes, values, center, step, rounds):
    """Prices p ≥ 0 with the highest min_k values_k + slopes_k·(p - center) less |p - center|²/(2·step).

    That is p = max(0, center + step·Σ_k w_k·slopes_k) for the best weights w ≥ 0 that add up to 1: in each round the
    cut of least value takes weight from the cut of highest value.
    """
    num_cuts, num_times = slopes.shape
    weights, part = np.zeros(num_cuts), np.empty(num_cuts)
    weights[np.argmin(values)] = 1.0
    prices = np.empty(num_times)
    for _ in range(rounds):
        pause()
        for t in range(num_times):
            total = 0.0
            for k in range(num_cuts):
                total += weights[k] * slopes[k, t]
            prices[t] = max(0.0, center[t] + step * total)
        low, high = 0, -1
        for k in range(num_cuts):
            part[k] = values[k]
            for t in range(num_times):
                part[k] += slopes[k, t] * (prices[t] - center[t])
            if part[k] < part[low]:
                low = k
            if weights[k] > 0.0 and (high < 0 or part[k] > part[high]):
                high = k
        apart = 0.0
        for t in range(num_times):
            between = slopes[low, t] - slopes[high, t]
            apart += between * between
        if apart == 0.0 or part[high] - part[low] <= 1e-9 * abs(part[low]):
            break
        moved = min(weights[high], (part[high] - part[low]) / (step * apart))
        weights[high] -= moved
        weights[low] += moved
    return prices
