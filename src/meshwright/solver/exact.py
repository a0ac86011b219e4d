"""Closes a small model: bound, fix, reduce, search, split, over an ever larger part of the gap, until it is proven."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshwright.solver.decimate import settled
from meshwright.solver.dual import Dual, at_prices, carried, climb_prices
from meshwright.solver.elimination import eliminate
from meshwright.solver.frontier import Found, search
from meshwright.solver.mend import mended, relaxed
from meshwright.solver.model import Model
from meshwright.solver.order import decision_order, permuted
from meshwright.solver.reductions.reduce import reduce_model
from meshwright.solver.reductions.times import tighten_times
from meshwright.solver.split import split
from meshwright.solver.state import State, cost_of
from meshwright.solver.tables import combinations

_BEAM = 30
_WIDTH = 100_000
_FIRST_GAP = 1e-4  # the first part of the gap to search, relative to the bound
_EFFORT = 1e4
_COMBINATIONS = 2e4  # up to here an elimination mostly ends within so many rows
_ROWS = 6e5
_MOST_COMBINATIONS = 2e5  # up to here it is worth a try with fewer
_FEWER_ROWS = 1e5
_PATIENT_ROWS = 5e4
_SEARCHED = 1000  # states beyond one for each node up to which a model is searched along a frontier before it is split
_FEWER = 0.6  # the part of the combinations with which one failed at which the next is tried
_FIRST_REACH = 1e-3  # the part of the bound within which a first choice is looked for, in haste
_SWEEPS = 20
_CLIMB = 60  # most steps of the prices, each of which aims this part above the bound at first
_REACH = 0.1
_SHORT_CLIMB = 30  # the same for a part of a model, whose prices are known
_HARDLY = 0.1  # the part of the gap that a split should close on one side at least
_ROWS_A_SECOND = 3e5
_MORE_PATIENCE, _MOST_PATIENCE = 3.0, 100.0
_PAUSE = 0.5  # splits for each time as many rows as usual that a failed elimination made
_SHRUNK = 0.8  # where fewer of its states are left, a model is made anew
_REORDERED = 0.7  # where fewer of its nodes are left, their order is sought anew
_SCALES = (0.5, 0.8, 1.3, 2.0)
_DEAREST = 4  # times whose prices are changed one by one
_CHANGES = (0.5, 2.0)
_DEAR = 0.02  # the part of the bound above it from which a choice is improved before anything is proven
_ALIKE = 0.03  # the part of the gap that a split must close on one side, or the states are searched as a whole
_THOROUGH = 5e5  # rows of that elimination
_NEARLY = 0.5  # a goal that is this part of the way to the best choice is raised to its cost


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


@dataclass
class Closer:
    """Options of a closing attempt.

    Attributes:
        tolerance: Improvements smaller than this do not matter (0.5 where all costs are whole numbers).
        deadline: `time.perf_counter()` at which to stop with what is there.
        effort: Most labels of a frontier search, for models that are too entangled for elimination.
        width: Most labels that it keeps after each node.
        few: Combinations of states up to which a model is eliminated as a whole.
        patience: How many times as many rows are made where splitting hardly raises the bound; grows as that fails.
        pause: Splits to make before that is tried again: they take about as long as the elimination that failed.
        splits: Whether to split at all.
        gap: The gap at which to stop, as a part of the cost; `offset` is what the model leaves out of the cost.
        goal: A bound at which to stop, whatever was found.
        slack: The same as a difference, once the bound is known.
        improve: Makes a choice cheaper, given a dual, the choice or None, the tolerance and the deadline.
    """

    tolerance: float
    deadline: float
    effort: float = _EFFORT
    width: int = _WIDTH
    few: float = _MOST_COMBINATIONS
    patience: float = 10.0
    pause: float = 0.0
    splits: bool = True
    gap: float = 0.0
    offset: float = 0.0
    goal: float = np.inf
    slack: float = 0.0
    improve: Callable[[Dual, np.ndarray | None, float, float], np.ndarray | None] | None = None

    def close(
        self,
        model: Model,
        cutoff: float = np.inf,
        prices: np.ndarray | None = None,
        known: np.ndarray | None = None,
    ) -> Closed:
        """Finds the cheapest choice below the cutoff, or proves that there is none (then bound = cutoff).

        Args:
            model: The model.
            cutoff: Choices that cost as much do not matter.
            prices: Prices of memory to begin with.
            known: A choice that costs the cutoff, to begin with where nothing cheaper is soon found.
        """
        if model.num_nodes == 0:
            return Closed(np.zeros(0, dtype=np.int64), 0.0, 0.0) if cutoff > 0 else Closed(None, np.inf, cutoff)
        order = decision_order(model)
        dual = Dual(permuted(model, order), prices=prices)
        dual.converge(_SWEEPS, 1e-6, self.deadline)
        if len(model.cap):
            climb_prices(dual, _REACH * abs(dual.bound), _CLIMB, cutoff, self.deadline)
        closer = replace(self, slack=max(self.tolerance, self.gap * abs(dual.bound + self.offset)))
        start = closer._probed(dual, cutoff)
        if start.cost >= cutoff and known is not None:
            start = replace(start, choice=known[order], cost=cost_of(model, known))
        found = closer._below(dual, start, cutoff, self.goal)
        if found.choice is None or found.cost >= cutoff:
            return Closed(None, np.inf, found.bound)
        choice = np.empty(model.num_nodes, dtype=np.int64)
        choice[order] = found.choice
        return replace(found, choice=choice)

    def _probed(self, dual: Dual, cutoff: float) -> Closed:
        """A first choice below the cutoff: read from the dual, or looked for in haste ever further above the bound."""
        best = self._first(dual, cutoff)
        reach = _FIRST_REACH * max(abs(dual.bound), 1e-9)
        while self.splits and best.bound < self.goal and time.perf_counter() < self.deadline:
            if best.bound + max(reach, self.slack) >= min(best.cost, cutoff):
                break
            goal = best.bound + reach
            best = better(best, replace(self, splits=False).attempt(dual, goal))
            if best.bound < goal:
                break
            reach *= 4.0
        return best

    def _below(self, dual: Dual, best: Closed, cutoff: float, enough: float) -> Closed:
        """Looks for cheaper choices: goals just above what is proven, and further each time, up to a bound."""
        step, fresh = 0.0, self.improve is not None and len(dual.model.cap) > 0
        while best.bound < min(best.cost - self.slack, cutoff - self.slack, enough):
            ceiling = min(best.cost, cutoff)
            if time.perf_counter() > self.deadline:
                break
            alive = dual.floor <= ceiling
            if alive.mean() < _SHRUNK:  # for good
                best = better(best, self._attempt_part(dual, alive, ceiling, best, enough))
                break
            if fresh:
                best, fresh = self._prepared(dual, best, cutoff), False
                continue
            step = 2.0 * step or max(_FIRST_GAP * max(abs(best.bound), 1e-9), 0.5 * (best.bound - dual.bound))
            near = best.choice is not None and step > _NEARLY * (ceiling - best.bound)
            best = better(best, self.attempt(dual, ceiling if near else min(ceiling, best.bound + step)))
        return replace(best, bound=min(best.bound, best.cost, cutoff))

    def _prepared(self, dual: Dual, best: Closed, cutoff: float) -> Closed:
        """Improves the choice where it is dear, or where splits promise little; then all below it is searched as well.

        Splits promise little where many lumps are alike. Such lumps make few different labels, so that one search over
        the whole model may do, if only its goal is low.
        """
        dual.restore()
        dear = best.cost > dual.bound + _DEAR * abs(dual.bound + self.offset)
        alike = not dear and split(dual, min(best.cost, cutoff)).worth < _ALIKE
        if self.improve is None or not (dear or alike):
            return best
        choice = self.improve(dual, best.choice, self.tolerance, self.deadline)
        if choice is not None:
            cost = cost_of(dual.model, choice)
            best = replace(best, choice=choice, cost=cost) if cost < best.cost else best
        if alike and best.choice is not None and (dual.floor <= best.cost).mean() >= _SHRUNK:
            best = better(best, self._searched(dual, min(best.cost, cutoff), partial(eliminate, effort=_THOROUGH)))
        return best

    def attempt(self, dual: Dual, goal: float) -> Closed:
        """Searches all choices cheaper than the goal: states that cannot be in one go first, and what follows."""
        most = self._most(dual, goal)
        if dual.bound > most:
            return Closed(None, np.inf, goal)
        if (dual.floor <= most).mean() < _SHRUNK:
            return self._attempt_part(dual, dual.floor <= most, goal)
        best = Closed(None, np.inf, dual.bound)
        count = combinations(dual, most, _MOST_COMBINATIONS) if self.few else np.inf
        if count <= self.few:
            best = self._searched(
                dual, goal, partial(eliminate, effort=_ROWS if count <= _COMBINATIONS else _FEWER_ROWS)
            )
            if best.bound >= min(best.cost, goal):
                return best
            self.few = _FEWER * count
        elif not self.splits or (not self.few and len(dual.model.cost) - dual.model.num_nodes <= _SEARCHED):
            best = self._searched(dual, goal, partial(search, width=self.width, effort=self.effort))
            if best.bound >= min(best.cost, goal):
                return best
        if not self.splits or time.perf_counter() > self.deadline:
            return self._mended(dual, best)
        dual.restore()
        parts, worth = split(dual, goal)
        self.pause -= 1.0
        look = self._patiently(count) if worth < _HARDLY and self.pause < 0.0 else None  # alike lumps make few rows
        if look is not None:
            best = better(best, self._searched(dual, goal, look))
            if best.bound >= min(best.cost, goal):
                return best
            self.pause = _PAUSE * self.patience
            self.patience = min(_MORE_PATIENCE * self.patience, _MOST_PATIENCE)
        if len(parts) > 1:
            best = self._mended(dual, best)
        return self._attempt_parts(dual, parts, replace(best, bound=min(best.cost, goal)))

    def _patiently(self, count: float) -> Callable[[list[Dual], float], Found] | None:
        """A search with more effort than usual; None where elimination is wanted and stands no chance."""
        left = max(0.0, _ROWS_A_SECOND * (self.deadline - time.perf_counter()))
        if count <= _MOST_COMBINATIONS:
            return partial(eliminate, effort=min(self.patience * _PATIENT_ROWS, left))
        return None if self.few else partial(search, width=self.width, effort=min(self.patience * self.effort, left))

    def _most(self, dual: Dual, goal: float) -> float:
        """What a choice that is cheaper than the goal costs at most."""
        return goal - self.tolerance + 1e-12 * abs(dual.bound)

    def _searched(self, dual: Dual, goal: float, look: Callable[[list[Dual], float], Found]) -> Closed:
        """What a search by several duals finds; if they rule out many states, what the smaller model holds."""
        most, fan = self._most(dual, goal), self._fan(dual)
        floor = np.max([one.floor for one in fan], axis=0)
        if (floor <= most).mean() < _SHRUNK:
            return self._attempt_part(dual, floor <= most, goal)
        found = look(fan, most)
        cost = np.inf if found.choice is None else cost_of(dual.model, found.choice)
        return Closed(found.choice, cost, min(cost, goal) if found.complete else dual.bound)

    def _attempt_parts(self, dual: Dual, parts: Sequence[np.ndarray], found: Closed) -> Closed:
        """Searches parts of a model for what is cheaper than was found."""
        best, cost, goal, bound = found.choice, found.cost, found.bound, np.inf
        for alive in parts:
            part = self._attempt_part(dual, alive, goal)
            if part.cost < cost:
                best, cost, goal = part.choice, part.cost, min(goal, part.cost)
            bound = min(bound, part.bound)
        return Closed(best, cost, min(bound, goal))

    def _attempt_part(
        self, dual: Dual, alive: np.ndarray, goal: float, known: Closed | None = None, enough: float = np.inf
    ) -> Closed:
        """Searches the model without the states that are not alive, after all reductions that this allows.

        Where a bound and perhaps a choice are known, by rising goals from there on; else all that is cheaper at once.
        """
        if time.perf_counter() > self.deadline:
            return Closed(None, np.inf, dual.bound)
        dual.restore()
        reduced = reduce_model(settled(dual), alive, growth=16.0, most_work=20_000_000, deadline=self.deadline)
        if reduced.infeasible:
            return Closed(None, np.inf, goal)
        model = tighten_times(reduced.model)
        target = goal - reduced.offset
        if model.num_nodes == 0:
            choice = reduced.way_back.expand(np.zeros(0, dtype=np.int64)).astype(np.int64)
            return Closed(choice, reduced.offset, max(dual.bound, min(goal, reduced.offset)))
        alike = model.num_nodes > _REORDERED * dual.model.num_nodes
        order = np.arange(model.num_nodes) if alike else decision_order(model)
        smaller = Dual(permuted(model, order), prices=carried(dual.prices, dual.model, model))
        smaller.converge(20, 1e-7, self.deadline)
        if len(model.cap) and smaller.bound < target - self.tolerance:
            climb_prices(smaller, target - smaller.bound, _SHORT_CLIMB, target, self.deadline)
        if known is None:
            found = self.attempt(smaller, target)
        else:
            start = Closed(None, np.inf, max(smaller.bound, known.bound - reduced.offset))
            held = None if known.choice is None else reduced.way_back.restrict(known.choice)
            if held is not None:
                start = replace(start, choice=held[order], cost=cost_of(model, held))
            found = self._below(smaller, start, target, enough - reduced.offset)
        bound = max(dual.bound, min(goal, found.bound + reduced.offset))  # what was dropped costs at least the goal
        if found.choice is None:
            return Closed(None, np.inf, bound)
        choice = np.empty(model.num_nodes, dtype=np.int64)
        choice[order] = found.choice
        return Closed(reduced.way_back.expand(choice).astype(np.int64), found.cost + reduced.offset, bound)

    def _first(self, dual: Dual, cutoff: float) -> Closed:
        """A choice to begin with: decoded if it fits, else mended."""
        dual.restore()
        decoded = State.of(dual.model, dual.decode())
        if decoded.fits(dual.model):
            found = Closed(decoded.choice, decoded.cost, dual.bound)
        else:
            found = self._mended(dual, Closed(None, np.inf, dual.bound))
        return found if found.cost < cutoff else Closed(None, np.inf, dual.bound)

    def _mended(self, dual: Dual, found: Closed) -> Closed:
        """What was found, or a cheaper choice mended from it or from one that is cheap at the dual's prices."""
        model = dual.model
        dual.restore()
        for choice in (found.choice, relaxed(dual, _BEAM)):
            if choice is not None and len(model.cap):
                state = mended(model, dual.links, choice)
                if state.cost < found.cost and state.fits(model):
                    found = replace(found, choice=state.choice, cost=state.cost)
        return found

    def _fan(self, dual: Dual) -> list[Dual]:
        """The dual at its best, and others with each of its dearest times cheaper and dearer than that.

        A row of an elimination that saves memory at one time and wastes it at another is ruled out by the dual that
        knows the difference; of one time only, by several prices.
        """
        dual.restore()
        worth = dual.prices * dual.model.cap
        dearest = [time for time in np.argsort(-worth, kind="stable")[:_DEAREST] if worth[time] > 0]
        if len(dearest) < 2:
            changes = [(slice(None), scale) for scale in _SCALES if dearest]
        else:
            changes = [(time, scale) for time in dearest for scale in _CHANGES]
        fan = [dual]
        for times, scale in changes:
            prices = dual.prices.copy()
            prices[times] *= scale
            fan.append(at_prices(dual, prices, self.deadline))
        return fan


def better(one: Closed, other: Closed) -> Closed:
    """The cheaper choice of two attempts at one model and the higher of their bounds."""
    best = one if one.cost <= other.cost else other
    return replace(best, bound=max(one.bound, other.bound))
