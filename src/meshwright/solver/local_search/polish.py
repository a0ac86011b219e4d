"""First choices of a small model: cheap ones at several prices of memory, annealed, and the best mix of them all."""

import numpy as np

from meshwright.jit import clock
from meshwright.solver.bounds.dual import Dual, at_prices
from meshwright.solver.exact.repair import mended, relaxed
from meshwright.solver.local_search.moves import Neighbourhood
from meshwright.solver.model.choice import State

_SCALES = (1.0, 1.3, 0.5, 2.0, 0.8, 4.0, 0.2)  # of the dual's prices, in the order in which they are tried
_STALE = 2  # starts in a row that may bring nothing
_BEAM = 30
_SPREAD = 0.5  # of the logarithm of the price from node to node


def improved(dual: Dual, choice: np.ndarray | None, tolerance: float, deadline: float) -> np.ndarray | None:
    """A cheaper choice than the given one as far as one is soon found, the given one otherwise; None for none.

    Where memory binds, choices that are cheap at other prices than the dual's differ from one another in large parts.
    Each is annealed, and of two choices the best mix is taken: what is left to decide is small.
    """
    model = dual.model
    dual.restore()
    moves = Neighbourhood(model, tolerance, 0, dual.links, timed=False)
    moves.charge(dual.prices)
    state = None if choice is None else State.of(model, choice)
    if state is not None:
        _mix_annealed(moves, state, state.choice, deadline)
    stale = 0
    for scale in _SCALES:
        if stale == _STALE or clock() > deadline:
            break
        start = _start(at_prices(dual, scale * dual.prices, deadline))
        if start is None:
            continue
        before = np.inf if state is None else state.cost
        if state is None:
            state = start
        else:
            moves.mix(state, start.choice, deadline)
        _mix_annealed(moves, state, start.choice, deadline)
        stale = 0 if state.cost < before - tolerance else stale + 1
    return None if state is None else state.choice


def _start(dual: Dual) -> State | None:
    """A choice that is cheap at the dual's prices, changed until it fits; None where that fails."""
    choice = relaxed(dual, _BEAM)
    if choice is None:
        return None
    state = mended(dual.model, dual.links, choice)
    return state if state.fits(dual.model) else None


def _mix_annealed(moves: Neighbourhood, state: State, choice: np.ndarray, deadline: float) -> None:
    """Puts the better parts of an annealed choice into the state."""
    moves.mix(state, moves.anneal(choice, np.arange(moves.model.num_nodes), 1.0, _SPREAD), deadline)
