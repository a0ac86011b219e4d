"""Closes a small model: bound, fix, reduce, search, split, over an ever larger part of the gap, until it is proven."""

import time
from dataclasses import dataclass, replace

import numpy as np

from meshwright.solver.decimate import decimate
from meshwright.solver.dual import Dual, ascend_prices, carried
from meshwright.solver.frontier import search
from meshwright.solver.model import Model
from meshwright.solver.order import decision_order, permuted
from meshwright.solver.reductions.reduce import reduce_model
from meshwright.solver.reductions.times import tighten_times
from meshwright.solver.split import halves
from meshwright.solver.state import State, cost_of

_BEAM = 60
_DECIMATED = 8_000  # states up to which decimation finds the first choice, this part of the nodes in each round
_PART = 0.1
_WIDTH = 100_000
_FIRST_GAP = 1e-4  # the first part of the gap to search, relative to the bound
_EFFORT = 1e4
_PROBES = (1e-3, 4e-3, 1.6e-2)  # parts of the bound within which a first choice is looked for, in haste
_AIMS = (0.05, 0.005)  # how far above the bound its prices aim, relative to it
_SCALES = (0.0, 0.5, 0.8, 1.3, 2.0, 4.0)


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
        effort: Most labels of one frontier search; where they do not suffice, the states of one node are split.
        width: Most labels that a frontier search keeps after each node.
        splits: Whether to split at all.
    """

    tolerance: float
    deadline: float
    effort: float = _EFFORT
    width: int = _WIDTH
    splits: bool = True

    def close(self, model: Model, cutoff: float = np.inf, prices: np.ndarray | None = None) -> Closed:
        """Finds the cheapest choice below the cutoff, or proves that there is none (then bound = cutoff)."""
        if model.num_nodes == 0:
            return Closed(np.zeros(0, dtype=np.int64), 0.0, 0.0) if cutoff > 0 else Closed(None, np.inf, cutoff)
        order = decision_order(model)
        dual = Dual(permuted(model, order), prices=prices)
        best, cost = self._open(dual, cutoff)
        ceiling = min(cost, cutoff)
        below = self._below(dual, ceiling)
        if below.choice is not None and below.cost < ceiling:
            best, cost = below.choice, below.cost
        bound = min(below.bound, cost, cutoff)
        if best is None:
            return Closed(None, np.inf, bound)
        choice = np.empty(model.num_nodes, dtype=np.int64)
        choice[order] = best
        return Closed(choice, cost, bound)

    def _open(self, dual: Dual, cutoff: float) -> tuple[np.ndarray | None, float]:
        """Brings the dual near its best and finds a first choice below the cutoff."""
        dual.converge(60, 1e-6, self.deadline)
        if len(dual.model.cap):
            for part in _AIMS:
                ascend_prices(dual, min(cutoff, dual.bound + part * abs(dual.bound)), 50, self.deadline)
        best, cost = self._first(dual)
        if dual.bound < min(cost, cutoff) - self.tolerance:
            dual.converge(300, 1e-6, self.deadline)
        for part in _PROBES if self.splits else ():
            reach = part * abs(dual.bound)
            if min(cost, cutoff) <= dual.bound + reach:
                break
            dual.restore()
            found = replace(self, splits=False).attempt(dual, dual.bound + reach)
            if found.cost < cost:
                best, cost = found.choice, found.cost
        return (best, cost) if cost < cutoff else (None, np.inf)

    def _below(self, dual: Dual, ceiling: float) -> Closed:
        """Looks for choices cheaper than the ceiling: goals just above what is proven, and further each time."""
        bound, best, cost = dual.bound, None, np.inf
        step = _FIRST_GAP * max(abs(bound), 1e-9)
        while bound < ceiling - self.tolerance and time.perf_counter() < self.deadline:
            dual.restore()
            found = self.attempt(dual, min(ceiling, bound + step))
            if found.cost < ceiling:
                best, cost, ceiling = found.choice, found.cost, found.cost
            bound = max(bound, min(found.bound, ceiling))
            step *= 2.0
        return Closed(best, cost, bound)

    def attempt(self, dual: Dual, goal: float) -> Closed:
        """Searches all choices cheaper than the goal: states that cannot be in one go first, and what follows."""
        dual.sweep()
        noise = 1e-12 * abs(dual.now)
        alive = dual.reduced <= goal - self.tolerance - dual.now + noise
        if alive.mean() < 0.8:
            return self._attempt_part(dual, alive, goal)
        found = search(self._fan(dual), goal - self.tolerance + noise, self.width, self.effort)
        cost = np.inf if found.choice is None else cost_of(dual.model, found.choice)
        if found.complete:
            return Closed(found.choice, cost, min(cost, goal))
        if not self.splits or time.perf_counter() > self.deadline:
            return Closed(found.choice, cost, dual.bound)
        dual.restore()
        return self._attempt_halves(dual, Closed(found.choice, cost, min(cost, goal)))

    def _attempt_halves(self, dual: Dual, found: Closed) -> Closed:
        """Splits the states of one node in two, and searches both halves for what is cheaper than was found."""
        best, cost, goal, bound = found.choice, found.cost, found.bound, np.inf
        for half in halves(dual, goal):
            part = self._attempt_part(dual, half, goal)
            if part.cost < goal:
                best, cost, goal = part.choice, part.cost, part.cost
            bound = min(bound, part.bound)
        return Closed(best, cost, min(bound, goal))

    def _attempt_part(self, dual: Dual, alive: np.ndarray, goal: float) -> Closed:
        """Searches the model without the states that are not alive, after all reductions that this allows."""
        if time.perf_counter() > self.deadline:
            return Closed(None, np.inf, dual.bound)
        reduced = reduce_model(dual.model, alive, growth=16.0, most_work=20_000_000, deadline=self.deadline)
        if reduced.infeasible:
            return Closed(None, np.inf, goal)
        model = tighten_times(reduced.model)
        target = goal - reduced.offset
        if model.num_nodes == 0:
            choice = reduced.way_back.expand(np.zeros(0, dtype=np.int64)).astype(np.int64)
            return Closed(choice, reduced.offset, max(dual.bound, min(goal, reduced.offset)))
        order = decision_order(model)
        smaller = Dual(permuted(model, order), prices=carried(dual.prices, dual.model, model))
        smaller.converge(20, 1e-7, self.deadline)
        if len(model.cap) and smaller.bound < target - self.tolerance:
            ascend_prices(smaller, target, 40, self.deadline, step=0.2)
        found = self.attempt(smaller, target)
        bound = max(dual.bound, min(goal, found.bound + reduced.offset))  # what was dropped costs at least the goal
        if found.choice is None:
            return Closed(None, np.inf, bound)
        choice = np.empty(model.num_nodes, dtype=np.int64)
        choice[order] = found.choice
        return Closed(reduced.way_back.expand(choice).astype(np.int64), found.cost + reduced.offset, bound)

    def _first(self, dual: Dual) -> tuple[np.ndarray | None, float]:
        """A choice to begin with: the decoded one if it fits, else by decimation or, where large, a narrow search."""
        model = dual.model
        decoded = dual.decode()
        found: list[np.ndarray | None] = [decoded]
        if not State.of(model, decoded).fits(model):
            if len(model.cost) <= _DECIMATED:
                found = [decimate(model, scale * dual.prices, self.deadline, _PART) for scale in (1.0, 1.5)]
            else:  # a finite ceiling is needed to rank labels by the duals' budgets
                ceiling = dual.now + max(abs(dual.now), 1.0) * 1e3
                width = max(16, min(_BEAM, 40_000 // (len(model.cap) + 1)))
                found = [search([dual], ceiling, width).choice]
        states = [State.of(model, choice) for choice in found if choice is not None]
        fitting = [state for state in states if state.fits(model)]
        best = min(fitting, key=lambda state: state.cost, default=None)
        return (None, np.inf) if best is None else (best.choice, best.cost)

    def _fan(self, dual: Dual) -> list[Dual]:
        """The dual, and others with its prices scaled down and up."""
        fan = [dual]
        if dual.prices.any():
            for scale in _SCALES:
                scaled = Dual(dual.model, dual.links, dual.prices * scale)
                scaled.m[:] = dual.m
                scaled.converge(10, 1e-6, self.deadline)
                fan.append(scaled)
        return fan
