"""What is known of a model or of a part of it: a bound, a choice, and the way back from the part to the whole."""

from dataclasses import dataclass, replace

import numpy as np

from meshwright.solver.dual import Dual
from meshwright.solver.mend import mended, relaxed
from meshwright.solver.reductions.reduce import WayBack
from meshwright.solver.state import State

_BEAM = 30


@dataclass(frozen=True, eq=False)
class Closed:
    """What a closing attempt found.

    Attributes:
        choice: The cheapest choice below the cutoff that was met, or None.
        cost: Its cost; inf where there is none.
        bound: No choice costs less than this, up to the tolerance (inf where none fits at all).
    """

    choice: np.ndarray | None
    cost: float
    bound: float


@dataclass(frozen=True, eq=False)
class Part:
    """What is left of a part of a model, and the way back to the whole: whole cost = offset + cost in the part.

    Attributes:
        dual: Its dual.
        offset: Cost of all that is settled in it.
        steps: From the part to the whole: the order of its nodes and the way back through its reductions.
    """

    dual: Dual
    offset: float = 0.0
    steps: tuple[tuple[np.ndarray, WayBack], ...] = ()

    def restrict(self, choice: np.ndarray) -> np.ndarray | None:
        """The choice of the part behind one of the whole; None where a state is no longer there."""
        for order, way_back in reversed(self.steps):
            held = way_back.restrict(choice)
            if held is None:
                return None
            choice = held[order]
        return choice

    def whole(self, found: Closed) -> Closed:
        """What was found in the part, in terms of the whole."""
        choice = found.choice
        if choice is not None:
            for order, way_back in self.steps:
                placed = np.empty(len(order), dtype=np.int64)
                placed[order] = choice
                choice = way_back.expand(placed).astype(np.int64)
        return Closed(choice, found.cost + self.offset, found.bound + self.offset)


def better(one: Closed, other: Closed) -> Closed:
    """The cheaper choice of two attempts at one model and the higher of their bounds."""
    best = one if one.cost <= other.cost else other
    return replace(best, bound=max(one.bound, other.bound))


def decoded_found(dual: Dual, cutoff: float) -> Closed:
    """The choice that the dual reads, where it fits and is below the cutoff."""
    dual.restore()
    decoded = State.of(dual.model, dual.decode())
    if decoded.cost < cutoff and decoded.fits(dual.model):
        return Closed(decoded.choice, decoded.cost, dual.bound)
    return Closed(None, np.inf, dual.bound)


def mended_found(dual: Dual, found: Closed, cutoff: float = np.inf) -> Closed:
    """What was found, or a cheaper choice mended from it or from one that is cheap at the dual's prices."""
    model = dual.model
    dual.restore()
    for choice in (found.choice, relaxed(dual, _BEAM)):
        if choice is not None and len(model.cap):
            state = mended(model, dual.links, choice)
            if state.cost < min(found.cost, cutoff) and state.fits(model):
                found = replace(found, choice=state.choice, cost=state.cost)
    return found
