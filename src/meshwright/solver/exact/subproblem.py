"""What is known of a model or of a part of it: a bound, a choice, and the way back from the part to the whole.

A part may also leave out the memory that hardly matters (`coarsened`): half of the nodes of a planning problem hold
vectors, such as biases, and all their splits together change a thousandth of the memory. Each may save a little for a
little, in any combination, which is what makes such problems hard to prove. Taken at their least, these rows are
constants, and nodes without rows are folded away. What is cheapest then bounds what is cheapest at all, and mostly fits
as it is.
"""

from dataclasses import dataclass, replace

import numpy as np

from meshwright.jit import kernel
from meshwright.solver.bounds.dual import Dual, carried, reparametrised
from meshwright.solver.bounds.memory_prices import climb_prices, relaxed
from meshwright.solver.deadline import Deadline
from meshwright.solver.exact.repair import repaired
from meshwright.solver.model.decision_order import decision_order, permuted
from meshwright.solver.model.model import Model, State
from meshwright.solver.reductions.reduce import WayBack, reduce_model
from meshwright.solver.reductions.times import tighten_times
from meshwright.solver.tuning import TUNING, Tuning


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
        offset: Cost of all that is fixed in it.
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


def reduced(
    part: Part,
    alive: np.ndarray,
    goal: float,
    tolerance: float,
    deadline: Deadline,
    model: Model | None = None,
    tuning: Tuning = TUNING,
) -> Part | Closed:
    """What is left of a part without the states that are not alive; or its best choice, where none is to be made.

    Choices that cost as much as the goal do not matter: states and pairs that only they hold may be gone as well.
    Where a model is given, it stands for that of the part: one with the same states.
    """
    dual = part.dual
    dual.restore()
    found = reduce_model(model or reparametrised(dual), alive, tuning.growth, tuning.most_work, deadline)
    if found.infeasible:
        return Closed(None, np.inf, goal)
    model = tighten_times(found.model, tuning)
    offset, target = part.offset + found.offset, goal - part.offset - found.offset
    if model.num_nodes == 0:
        choice = np.zeros(0, dtype=np.int64)
        # Without the states that are gone it is the best; with them, nothing is proven beyond the goal.
        best = Part(dual, offset, ((choice, found.way_back), *part.steps)).whole(Closed(choice, 0.0, 0.0))
        return replace(best, bound=min(best.bound, goal))
    alike = model.num_nodes > tuning.shrunk * dual.model.num_nodes
    order = np.arange(model.num_nodes) if alike else decision_order(model)
    smaller = Dual(permuted(model, order), prices=carried(dual.prices, dual.model.when, model.when))
    smaller.converge(20, 1e-7, deadline)
    if len(model.cap) and smaller.bound < target - tolerance:
        reach = target - smaller.bound if target < np.inf else tuning.price_reach * abs(smaller.bound)
        climb_prices(smaller, reach, tuning.part_price_sweeps, target, deadline, tuning)
    return Part(smaller, offset, ((order, found.way_back), *part.steps))


def states_of(model: Model, choices: list[np.ndarray]) -> np.ndarray:
    """Marks the states that some choices hold."""
    alive = np.zeros(len(model.cost), dtype=bool)
    for choice in choices:
        alive[model.off[:-1] + choice] = True
    return alive


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


def fitted(dual: Dual, found: Closed, cutoff: float, tuning: Tuning = TUNING) -> Closed:
    """What was found, repaired to fit; without its choice where that fails or costs as much as the cutoff.

    Its bound stays valid: what was found is the optimum of a relaxation, which costs no more than the optimum.
    """
    if found.choice is None:
        return found
    state = State.of(dual.model, found.choice)
    if not state.fits(dual.model):
        state = repaired(dual.model, dual.links, found.choice, tuning)
    if not state.fits(dual.model) or state.cost >= cutoff:
        return Closed(None, np.inf, found.bound)
    return Closed(state.choice, state.cost, found.bound)


def repaired_found(dual: Dual, found: Closed, cutoff: float = np.inf, tuning: Tuning = TUNING) -> Closed:
    """What was found, or a cheaper choice repaired from it or from one that is cheap at the dual's prices."""
    model = dual.model
    dual.restore()
    for choice in (found.choice, relaxed(dual, tuning)):
        if choice is not None and len(model.cap):
            state = repaired(model, dual.links, choice, tuning)
            if state.cost < min(found.cost, cutoff) and state.fits(model):
                found = replace(found, choice=state.choice, cost=state.cost)
    return found


def coarsened(model: Model, part: float) -> Model:
    """The model with its smallest rows at their least, as far as that leaves out no more than a part of any cap."""
    least, spread, share = row_extents(
        model.off, model.rnode, model.rstart, model.rend, model.roff, model.usage, model.cap
    )
    order = np.argsort(share, kind="stable")
    kept, cap = drop_small(order, model.rstart, model.rend, least, spread, model.cap, part)
    rows = {name: getattr(model, name)[kept] for name in ("rnode", "rstart", "rend", "roff")}
    return model._replace(cap=cap, **rows)


@kernel
def row_extents(off, rnode, rstart, rend, roff, usage, cap):
    """The least of each row, how much more its most is, and that as a part of the tightest cap."""
    least, spread, share = np.empty(len(rnode)), np.empty(len(rnode)), np.zeros(len(rnode))
    for r in range(len(rnode)):
        values = usage[roff[r] : roff[r] + off[rnode[r] + 1] - off[rnode[r]]]
        least[r] = values.min()
        spread[r] = values.max() - least[r]
        for t in range(rstart[r], rend[r]):
            if spread[r] > 0.0:
                share[r] = max(share[r], spread[r] / cap[t] if cap[t] > 0.0 else np.inf)
    return least, spread, share


@kernel
def drop_small(order, rstart, rend, least, spread, cap, part):
    """Which rows are kept, of those in order, and what is left of the caps without the least of the others."""
    kept, left, dropped = np.ones(len(order), np.bool_), cap.copy(), np.zeros(len(cap))
    for r in order:
        for t in range(rstart[r], rend[r]):
            if dropped[t] + spread[r] > part * cap[t]:
                return kept, left
        kept[r] = False
        for t in range(rstart[r], rend[r]):
            dropped[t] += spread[r]
            left[t] -= least[r]
    return kept, left
