"""First choices of a small model: cheap ones at several prices of memory, annealed, and the best mix of them all."""

import numpy as np

from meshwright.solver.bounds.dual import Dual, at_prices
from meshwright.solver.bounds.memory_prices import relaxed
from meshwright.solver.deadline import Deadline
from meshwright.solver.exact.repair import mended
from meshwright.solver.local_search.moves import Neighbourhood
from meshwright.solver.model.choice import State
from meshwright.solver.tuning import TUNING, Tuning


def improved(
    dual: Dual, choice: np.ndarray | None, tolerance: float, deadline: Deadline, tuning: Tuning = TUNING
) -> np.ndarray | None:
    """A cheaper choice than the given one as far as one is soon found, the given one otherwise; None for none.

    Where memory binds, choices that are cheap at other prices than the dual's differ from one another in large parts.
    Each is annealed, and of two choices the best mix is taken: what is left to decide is small.
    """
    model = dual.model
    dual.restore()
    moves = Neighbourhood(model, tolerance, 0, dual.links, timed=False, tuning=tuning)
    moves.charge(dual.prices)
    state = None if choice is None else State.of(model, choice)
    if state is not None:
        _mix_annealed(moves, state, state.choice, deadline)
    stale = False
    for scale in (1.0, *tuning.price_scales):
        if stale or deadline.is_over:
            break
        start = _start(at_prices(dual, scale * dual.prices, deadline), tuning)
        if start is None:
            continue
        before = np.inf if state is None else state.cost
        if state is None:
            state = start
        else:
            moves.mix(state, start.choice, deadline)
        _mix_annealed(moves, state, start.choice, deadline)
        stale = state.cost >= before - tolerance
    return None if state is None else state.choice


def _start(dual: Dual, tuning: Tuning) -> State | None:
    """A choice that is cheap at the dual's prices, changed until it fits; None where that fails."""
    choice = relaxed(dual, tuning)
    if choice is None:
        return None
    state = mended(dual.model, dual.links, choice, tuning)
    return state if state.fits(dual.model) else None


def _mix_annealed(moves: Neighbourhood, state: State, choice: np.ndarray, deadline: Deadline) -> None:
    """Puts the better parts of an annealed choice into the state."""
    moves.mix(state, moves.anneal(choice, np.arange(moves.model.num_nodes), 1.0, moves.tuning.price_spread), deadline)
