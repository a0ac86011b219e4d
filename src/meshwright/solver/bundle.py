"""Prices of memory at which a model's bound is highest, from exact minima at a few prices: a proximal bundle method.

Sweeps and steps along what the nodes take on their own lead close to them, and no further where several times bind. The
cheapest choice at some prices says more: what it costs at any other prices is no less than the bound there. The least
over several choices is a model of the bound, which is right where it was looked at; the next prices are those where it
is highest, less a penalty for going far.
"""

import time

import numpy as np

from meshwright.solver.buckets import arrange, cheapest
from meshwright.solver.dual import Dual
from meshwright.solver.kernel import kernel
from meshwright.solver.state import State

_COMBINATIONS = 2e5  # of states, with which the cheapest choice takes a few milliseconds
_NARROWER, _NARROWINGS = 0.5, 12  # how dearer states are left out until there are few enough combinations
_EVALUATIONS = 20
_FIRST_STEP = 0.3  # of the worth of the dearest time
_WORTH = 1e-5  # the part of the bound that a step must promise
_ENOUGH, _GOOD = 0.1, 0.5  # parts of what was promised: to move on, and to go further than before
_FURTHER, _LESS_FAR = 2.0, 0.5
_SWEEPS = 100
_ROUNDS = 300


def settle_prices(dual: Dual, reach: float, deadline: float) -> None:
    """Raises a dual's bound over the prices of several times, where it has found that some matter.

    Args:
        dual: The dual, left at its best.
        reach: How far above the bound the states are that may be part of the cheapest choices.
        deadline: `time.perf_counter()` at which to stop.
    """
    dual.restore()
    model, start = dual.model, dual.prices.copy()
    worth = float((start * model.cap).max(initial=0.0))
    if len(start) < 2 or worth <= 0.0:
        return
    reach = min(reach, abs(dual.bound))
    for _ in range(_NARROWINGS):
        buckets = arrange(dual.links, model.off, dual.floor <= dual.bound + reach, _COMBINATIONS)
        if buckets.combinations <= _COMBINATIONS:
            break
        reach *= _NARROWER
    if buckets.combinations > _COMBINATIONS or buckets.sizes.min() == 0:
        return
    unit = worth / np.where(model.cap > 0.0, model.cap, model.cap.max())
    best, center, slopes, costs, step = -np.inf, start / unit, [], [], 0.0
    prices, promised = center, 0.0
    for _ in range(_EVALUATIONS):
        if time.perf_counter() > deadline:
            break
        dual.set_prices(prices * unit)
        _, choice = cheapest(dual.links, model.off, dual.theta, buckets)
        state = State.of(model, choice)
        if not np.isfinite(state.cost):  # no choice of these states is possible
            break
        slope = (state.load - model.cap) * unit
        value = state.cost + float(prices @ slope)
        slopes.append(slope)
        costs.append(state.cost)
        if value > best + _ENOUGH * promised:
            step *= _FURTHER if value > best + _GOOD * promised else 1.0
            best, center = value, prices
        else:
            step *= _LESS_FAR
        step = step or _FIRST_STEP / max(float(np.abs(slope).max()), 1e-300)
        here = np.array(costs) + np.array(slopes) @ center
        prices = highest(np.array(slopes), here, center, step, _ROUNDS)
        promised = float((here + np.array(slopes) @ (prices - center)).min()) - best
        if promised <= _WORTH * abs(best):
            break
    dual.restore()
    dual.set_prices(center * unit)
    dual.converge(_SWEEPS, 1e-7, deadline)
    dual.restore()


@kernel
def highest(slopes, values, center, step, rounds):
    """Prices p ≥ 0 with the highest min_k values_k + slopes_k·(p - center) less |p - center|²/(2·step).

    That is p = max(0, center + step·Σ_k w_k·slopes_k) for the best weights w ≥ 0 that add up to 1: in each round the
    one whose part is least takes from the one whose part is most.
    """
    num_cuts, num_times = slopes.shape
    weights, part = np.zeros(num_cuts), np.empty(num_cuts)
    weights[np.argmin(values)] = 1.0
    prices = np.empty(num_times)
    for _ in range(rounds):
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
            apart += (slopes[low, t] - slopes[high, t]) ** 2
        if apart == 0.0 or part[high] - part[low] <= 1e-9 * abs(part[low]):
            break
        moved = min(weights[high], (part[high] - part[low]) / (step * apart))
        weights[high] -= moved
        weights[low] += moved
    return prices
