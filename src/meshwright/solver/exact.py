"""Closes a small model: bound, fix, reduce and search, again and again, until the optimum is proven."""

import time
from dataclasses import dataclass

import numpy as np

from meshwright.solver import sweeps
from meshwright.solver.dual import Dual, ascend_prices
from meshwright.solver.frontier import search
from meshwright.solver.model import Model
from meshwright.solver.order import decision_order, permuted
from meshwright.solver.reductions.reduce import reduce_model
from meshwright.solver.reductions.times import tighten_times

_WIDTHS = (200, 4_000, 60_000)
_FIRST_GAP = 1e-4  # the first part of the gap to search, relative to the bound


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
        width: Most labels of the frontier search.
    """

    tolerance: float
    deadline: float
    width: int = _WIDTHS[-1]

    def close(self, model: Model, cutoff: float) -> Closed:
        """Finds the cheapest choice below the cutoff, or proves that there is none (then bound = cutoff)."""
        if model.num_nodes == 0:
            return Closed(np.zeros(0, dtype=np.int64), 0.0, 0.0) if cutoff > 0 else Closed(None, np.inf, cutoff)
        order = decision_order(model)
        found = self._close_ordered(permuted(model, order), cutoff)
        if found.choice is None:
            return found
        choice = np.empty(model.num_nodes, dtype=np.int64)
        choice[order] = found.choice
        return Closed(choice, found.cost, found.bound)

    def _close_ordered(self, model: Model, cutoff: float) -> Closed:
        dual = Dual(model)
        dual.converge(60, 1e-6, self.deadline)
        best, cost = self._beam(dual, _WIDTHS[0], np.inf)
        goal = min(cost, cutoff)
        if len(model.cap) and dual.bound < goal - self.tolerance:
            target = goal if np.isfinite(goal) else dual.bound + 0.1 * abs(dual.bound)
            ascend_prices(dual, target, 150, self.deadline)
            dual.converge(20, 1e-6, self.deadline)
            again = self._beam(dual, _WIDTHS[0], cost)
            best, cost = again if again[1] < cost else (best, cost)
        elif dual.bound < goal - self.tolerance:
            dual.converge(200, 1e-8, self.deadline)
        if cost >= cutoff:
            best, cost = None, np.inf
        ceiling = min(cost, cutoff)
        below = self._below(dual, ceiling)
        if below.choice is not None and below.cost < ceiling:
            best, cost = below.choice, below.cost
        return Closed(best, cost, min(below.bound, min(cost, cutoff)))

    def _below(self, dual: Dual, ceiling: float) -> Closed:
        """Looks for choices cheaper than the ceiling, first narrowly, then over ever larger parts of the gap."""
        bound, best, cost = dual.bound, None, np.inf
        part = _FIRST_GAP
        while bound < ceiling - self.tolerance:
            goal = min(ceiling, bound + part * max(abs(bound), 1e-9))
            if ceiling - goal < 0.5 * (ceiling - bound):
                goal = ceiling
            found = self._attempt(dual, goal)
            if found.choice is not None and found.cost < ceiling:
                best, cost, ceiling = found.choice, found.cost, found.cost
            bound = max(bound, min(found.bound, ceiling))
            part *= 4.0
            gave_up = bound < min(goal, ceiling) - self.tolerance
            if gave_up or time.perf_counter() > self.deadline:
                break
        return Closed(best, cost, bound)

    def _attempt(self, dual: Dual, goal: float) -> Closed:
        """Searches all choices cheaper than the goal: states that cannot be in one go first, and what follows."""
        dual.restore()
        dual.sweep()
        room = goal - self.tolerance - dual.now
        noise = 1e-12 * abs(dual.now)
        alive = dual.reduced <= room + noise
        if alive.mean() < 0.8:
            reduced = reduce_model(dual.model, alive, growth=16.0, most_work=20_000_000, deadline=self.deadline)
            if reduced.infeasible:
                return Closed(None, np.inf, goal)
            smaller = tighten_times(reduced.model)
            found = self.close(smaller, goal - reduced.offset)
            choice = None if found.choice is None else reduced.expand(found.choice).astype(np.int64)
            return Closed(choice, found.cost + reduced.offset, max(dual.bound, found.bound + reduced.offset))
        for width in _WIDTHS:
            if width > self.width or time.perf_counter() > self.deadline:
                break
            base = self._back(dual)
            found = search(dual, goal - self.tolerance - base + noise, width)
            if found.complete:
                if found.choice is None:
                    return Closed(None, np.inf, goal)
                cost = self._cost(dual.model, found.choice)
                return Closed(found.choice, cost, min(cost, goal))
        return Closed(None, np.inf, dual.bound)

    def _beam(self, dual: Dual, width: int, ceiling: float) -> tuple[np.ndarray | None, float]:
        """A good choice by a narrow search, or the decoded one where that fits and is cheaper."""
        best, cost = None, np.inf
        decoded = dual.decode()
        if self._fits(dual.model, decoded):
            best, cost = decoded, self._cost(dual.model, decoded)
        base = self._back(dual)
        found = search(dual, min(ceiling, cost) - base, width)
        if found.choice is not None and self._cost(dual.model, found.choice) < cost:
            best, cost = found.choice, self._cost(dual.model, found.choice)
        return (best, cost) if np.isfinite(cost) else (None, np.inf)

    def _back(self, dual: Dual) -> float:
        """One backward sweep, as the frontier search needs; returns the bound."""
        dual.now = dual.half_sweep(False) - float(dual.price @ dual.model.cap)
        return dual.now

    @staticmethod
    def _cost(model: Model, choice: np.ndarray) -> float:
        return float(sweeps.model_cost(model.off, model.cost, model.eu, model.ev, model.eoff, model.mat, choice))

    @staticmethod
    def _fits(model: Model, choice: np.ndarray) -> bool:
        load = np.zeros(len(model.cap))
        sweeps.choice_load(model.rnode, model.rstart, model.rend, model.roff, model.usage, choice, load)
        return bool((load <= model.cap * (1 + 1e-12)).all())
