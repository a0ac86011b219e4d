"""Prices of memory at which a model's bound is highest: by sweeps, and by exact minima at a few prices.

The bound is a concave function of the prices. A proximal bundle method finds where it is highest from its values and
slopes at a few prices: each evaluation gives a cut, a linear upper bound on the function at all other prices. The
minimum of all cuts models the function; the next prices maximise the model less a penalty for the distance from the
best prices so far.
"""

import numpy as np

from meshwright.jit import kernel, pause
from meshwright.solver.bounds.dual import Dual
from meshwright.solver.bounds.unlimited_minimum import Buckets, arrange, cheapest
from meshwright.solver.deadline import NEVER, Deadline
from meshwright.solver.model.model import Model, State, cost_of
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


def climb_prices(
    dual: Dual,
    reach: float,
    sweeps: int,
    target: float = np.inf,
    deadline: Deadline = NEVER,
    tuning: Tuning = TUNING,
) -> float:
    """Raises a dual's bound over the prices by a bundle method with two sweeps at each price.

    Sweeps start from the best messages so far, so that cuts at other prices become outdated. Once the model promises
    no gain, all cuts but the one at the best prices are dropped.

    Args:
        dual: The dual of a model whose memory is limited, left at its best.
        reach: How much higher the first prices are to raise it.
        sweeps: About how many to make.
        target: The bound at which to stop.
        deadline: When to stop.
        tuning: Options.
    """
    dual.restore()
    dual.sweep()
    made, worth, steepness = 1, 10.0 * tuning.price_gain, _steepness(dual)
    while steepness == 0.0 and made < sweeps and not deadline.is_over:
        dual.sweep()  # which times bind may show only once the messages have converged
        made, steepness = made + 1, _steepness(dual)
    bundle = _known(dual, reach / max(steepness, 1e-300), tuning)
    while steepness > 0.0 and made < sweeps and dual.bound < target and not deadline.is_over:
        prices = bundle.ask()
        stale = bundle.promised <= worth * abs(bundle.best)
        if stale:
            dual.restore()
        else:
            dual.set_prices(prices / _unit(dual.model))
        for _ in range(tuning.sweeps_per_price):
            dual.sweep()
        made += tuning.sweeps_per_price
        if not stale:
            if not bundle.tell(prices, dual.now, _slope(dual)):
                dual.m[:] = dual.messages
        elif len(bundle.bases) == 1 and dual.bound <= bundle.best + tuning.price_gain * abs(bundle.best):
            break
        else:
            bundle, worth = _known(dual, bundle.step, tuning), 0.5 * worth
    dual.restore()
    return dual.bound


def settle_prices(dual: Dual, reach: float, deadline: Deadline, tuning: Tuning = TUNING) -> list[np.ndarray]:
    """Raises a dual's bound over the prices by a bundle of cheapest choices; returns these choices.

    The cheapest choice at some prices, without caps, gives a cut that is exact, which that of a sweep is not: its cost
    at any other prices is an upper bound on the bound there.

    Args:
        dual: The dual, whose prices are near the best, left at its best.
        reach: How far above the bound the states are that may be part of the cheapest choices.
        deadline: When to stop.
        tuning: Options.
    """
    dual.restore()
    model, unit = dual.model, _unit(dual.model)
    found: list[np.ndarray] = []
    highest = float((dual.prices * unit).max(initial=0.0))
    if highest <= 0.0:
        return []
    if (buckets := _near(dual, reach, tuning)) is None:
        return []
    bundle, prices = None, dual.prices * unit
    while len(found) < tuning.bundle_cuts and not deadline.is_over:  # each is a cut, and none is forgotten
        dual.set_prices(prices / unit)
        _, choice = cheapest(dual.links, model.off, dual.theta, buckets)
        state = State.of(model, choice)
        if not np.isfinite(state.cost):  # no choice of these states is possible
            break
        found.append(choice)
        slope = (state.load - model.cap) / unit
        value = state.cost + float(prices @ slope)
        if bundle is None:
            # The first step changes the worth of the most expensive time by about a third.
            bundle = Bundle(prices, value, slope, 0.3 * highest / max(float(np.abs(slope).max()), 1e-300), tuning)
        else:
            bundle.tell(prices, value, slope)
        prices = bundle.ask()
        if bundle.promised <= tuning.price_gain * abs(bundle.best):
            break
    if bundle is not None:
        for scale in tuning.price_scales:
            dual.set_prices(scale * bundle.center / unit)
            found.append(cheapest(dual.links, model.off, dual.theta, buckets)[1])
    dual.restore()
    if bundle is not None and bundle.best > dual.bound + tuning.price_gain * abs(dual.bound):
        dual.set_prices(bundle.center / unit)
        dual.converge(tuning.part_price_sweeps, 1e-7, deadline)
        dual.restore()
    return found


def relaxed(dual: Dual, tuning: Tuning = TUNING) -> np.ndarray | None:
    """The cheapest choice at a dual's prices, of the states near its bound, whether or not it fits; None for none."""
    buckets = _near(dual, np.inf, tuning)
    choice = dual.decode() if buckets is None else cheapest(dual.links, dual.model.off, dual.theta, buckets)[1]
    return choice if np.isfinite(cost_of(dual.model, choice)) else None


def _near(dual: Dual, reach: float, tuning: Tuning) -> Buckets | None:
    """Buckets of the states within reach of the bound, or nearer where these are too many; None where that fails."""
    reach, most = min(reach, tuning.minima_reach * abs(dual.bound)), tuning.trial_rows
    for _ in range(10):  # a minimum over fewer states than these is hardly better than the bound
        alive = dual.floor <= dual.bound + reach
        buckets = arrange(dual.links, dual.model.off, alive, most, tuning.few_nodes)
        if buckets.combinations <= most:
            return buckets if buckets.sizes.min() > 0 else None
        reach *= 0.4
    return None


def _unit(model: Model) -> np.ndarray:
    """The caps by which prices and loads are scaled, where zero is replaced by the largest cap."""
    return np.where(model.cap > 0.0, model.cap, max(float(model.cap.max(initial=0.0)), 1.0))


def _slope(dual: Dual) -> np.ndarray:
    """By how much the states that are cheapest by the latest sweep exceed the caps."""
    return (dual.load() - dual.model.cap) / _unit(dual.model)


def _steepness(dual: Dual) -> float:
    """How much the bound rises for a step along the slope, as far as prices can go there."""
    slope = _slope(dual)
    return float(np.square(slope[(slope > 0.0) | (dual.price > 0.0)]).sum())


def _known(dual: Dual, step: float, tuning: Tuning) -> Bundle:
    """A bundle of nothing but what sweeps at the best prices say."""
    return Bundle(dual.prices * _unit(dual.model), dual.bound, _slope(dual), step, tuning)
