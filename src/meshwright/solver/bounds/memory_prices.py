"""Prices of memory at which a model's bound is highest: by sweeps, and by exact minima at a few prices."""

import numpy as np

from meshwright.jit import clock
from meshwright.solver.bounds.bundle import Bundle
from meshwright.solver.bounds.dual import Dual
from meshwright.solver.bounds.unlimited_minimum import arrange, cheapest
from meshwright.solver.model.choice import State
from meshwright.solver.model.model import Model

_EACH = 2  # sweeps at each prices
_PATIENCE = 0.4  # the part of the sweeps that may pass before memory seems to bind
_WORTH, _LEAST_WORTH = 1e-4, 1e-6  # parts of the bound that the next prices must promise, at first and at last
_SMALLER = 0.5  # from one such part to the next
_GAINED = 1e-5  # the part of the bound that sweeps at the best prices gain where they are worth going on from
_COMBINATIONS = 2e5  # of states, with which the cheapest choice takes a few milliseconds
_WIDEST = 0.1  # the part of the bound within which states are looked at,
_NARROWER, _NARROWINGS = 0.4, 10  # and how dearer states are left out until there are few enough combinations
_EVALUATIONS = 20
_FIRST_STEP = 0.3  # of the worth of the dearest time
_PROMISED = 1e-5  # the part of the bound that the next prices must promise
_FEW = 6  # choices: where there are no more, those at the best prices times these are added
_AROUND = (0.5, 0.8, 1.25, 2.0)
_SWEEPS = 12  # at the best prices, in the end


def climb_prices(dual: Dual, reach: float, sweeps: int, target: float = np.inf, deadline: float = np.inf) -> float:
    """Raises a dual's bound over the prices by a bundle of what two sweeps at each say.

    Sweeps go on from the best messages so far, so that what was said of other prices grows out of date: where that
    leaves nothing to gain, all of it is forgotten but what is known at the best prices.

    Args:
        dual: The dual of a model whose memory is limited, left at its best.
        reach: How much higher the first prices are to raise it.
        sweeps: About how many to make.
        target: The bound at which to stop.
        deadline: `jit.clock()` at which to stop.
    """
    dual.restore()
    dual.sweep()
    made, worth, steepness = 1, _WORTH, _steepness(dual)
    while steepness == 0.0 and made < _PATIENCE * sweeps and clock() < deadline:
        dual.sweep()  # what binds may show only once messages have settled
        made, steepness = made + 1, _steepness(dual)
    bundle = _known(dual, reach / max(steepness, 1e-300))
    while steepness > 0.0 and made < sweeps and dual.bound < target and clock() < deadline:
        prices = bundle.ask()
        stale = bundle.promised <= worth * abs(bundle.best)
        if stale:
            dual.restore()
        else:
            dual.set_prices(prices / _unit(dual.model))
        for _ in range(_EACH):
            dual.sweep()
        made += _EACH
        if not stale:
            if not bundle.tell(prices, dual.now, _slope(dual)):
                dual.m[:] = dual.messages
        elif len(bundle.bases) == 1 and dual.bound <= bundle.best + _GAINED * abs(bundle.best):
            break
        else:
            bundle, worth = _known(dual, bundle.step), max(_SMALLER * worth, _LEAST_WORTH)
    dual.restore()
    return dual.bound


def settle_prices(dual: Dual, reach: float, deadline: float) -> list[np.ndarray]:
    """Raises a dual's bound over the prices by a bundle of cheapest choices; returns these choices.

    The cheapest choice at some prices, memory apart, says what no sweep can: its cost at any other prices is no less
    than the bound there.

    Args:
        dual: The dual, whose prices are near the best, left at its best.
        reach: How far above the bound the states are that may be part of the cheapest choices.
        deadline: `jit.clock()` at which to stop.
    """
    dual.restore()
    model, unit = dual.model, _unit(dual.model)
    found: list[np.ndarray] = []
    dearest = float((dual.prices * unit).max(initial=0.0))
    if dearest <= 0.0:
        return []
    reach = min(reach, _WIDEST * abs(dual.bound))
    for _ in range(_NARROWINGS):
        buckets = arrange(dual.links, model.off, dual.floor <= dual.bound + reach, _COMBINATIONS)
        if buckets.combinations <= _COMBINATIONS:
            break
        reach *= _NARROWER
    if buckets.combinations > _COMBINATIONS or buckets.sizes.min() == 0:
        return []
    bundle, prices = None, dual.prices * unit
    while len(found) < _EVALUATIONS and clock() < deadline:
        dual.set_prices(prices / unit)
        _, choice = cheapest(dual.links, model.off, dual.theta, buckets)
        state = State.of(model, choice)
        if not np.isfinite(state.cost):  # no choice of these states is possible
            break
        found.append(choice)
        slope = (state.load - model.cap) / unit
        value = state.cost + float(prices @ slope)
        if bundle is None:
            bundle = Bundle(prices, value, slope, _FIRST_STEP * dearest / max(float(np.abs(slope).max()), 1e-300))
        else:
            bundle.tell(prices, value, slope)
        prices = bundle.ask()
        if bundle.promised <= _PROMISED * abs(bundle.best):
            break
    if bundle is not None and len(found) < _FEW:
        for scale in _AROUND:
            dual.set_prices(scale * bundle.center / unit)
            found.append(cheapest(dual.links, model.off, dual.theta, buckets)[1])
    dual.restore()
    if bundle is not None and bundle.best > dual.bound + _GAINED * abs(dual.bound):
        dual.set_prices(bundle.center / unit)
        dual.converge(_SWEEPS, 1e-7, deadline)
        dual.restore()
    return found


def _unit(model: Model) -> np.ndarray:
    """Memory at each time, by which prices and loads are told; of a part of a model there may be none left."""
    return np.where(model.cap > 0.0, model.cap, max(float(model.cap.max(initial=0.0)), 1.0))


def _slope(dual: Dual) -> np.ndarray:
    """By how much the states that are cheapest by the latest sweep exceed the caps."""
    return (dual.load() - dual.model.cap) / _unit(dual.model)


def _steepness(dual: Dual) -> float:
    """How much the bound rises for a step along the slope, as far as prices can go there."""
    slope = _slope(dual)
    return float(np.square(slope[(slope > 0.0) | (dual.price > 0.0)]).sum())


def _known(dual: Dual, step: float) -> Bundle:
    """A bundle of nothing but what sweeps at the best prices say."""
    return Bundle(dual.prices * _unit(dual.model), dual.bound, _slope(dual), step)
