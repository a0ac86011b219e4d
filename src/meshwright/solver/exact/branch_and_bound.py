"""Closes a small model: bound, fix, reduce, search, split, over an ever larger part of the gap, until it is proven.

Small rows of memory are left out at first: what is cheapest then mostly fits, and is proven in a fraction of the time.
Goals rise from just above the bound: what is dearer than the goal need not be looked at, which leaves few states and
short searches. Below one goal the part with the least bound is searched or split first, so that a goal far above the
optimum costs little more than the optimum itself would as a goal.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush

import numpy as np

from meshwright.jit import clock
from meshwright.solver.bounds.dual import Dual
from meshwright.solver.bounds.memory_prices import settle_prices
from meshwright.solver.bounds.nearby_prices import Fan
from meshwright.solver.bounds.unlimited_minimum import arrange
from meshwright.solver.exact.branching import NONE, Split, split
from meshwright.solver.exact.bucket_elimination import eliminate
from meshwright.solver.exact.drop_small_memory import coarsened
from meshwright.solver.exact.frontier_search import Found, search
from meshwright.solver.exact.subproblem import Closed, Part, better, fitted, mended_found, reduced, states_of
from meshwright.solver.local_search.decimation import settled
from meshwright.solver.model.choice import cost_of
from meshwright.solver.model.model import Model

_WIDTH = 100_000
_FIRST_GAP = 4e-4  # the first part of the gap to search, relative to the bound
_EFFORT = 1e4
_COMBINATIONS = 2e4  # up to here an elimination mostly ends within so many rows
_ROWS = 9e5
_MOST_COMBINATIONS = 1e6  # up to here it is worth a try with fewer
_FEWER_ROWS = 1e5
_PROBED = 2e5  # the same where a first choice is looked for
_PATIENT_ROWS = 5e4
_SEARCHED = 1000  # states beyond one for each node up to which a model is searched along a frontier before it is split
_FEWER = 0.6  # the part of the combinations with which one failed at which the next is tried
_FIRST_REACH = 1e-3  # the part of the bound within which a first choice is looked for, in haste
_FURTHER = 4.0  # from one reach to the next
_HARDLY = 0.1  # the part of the gap that a split should close on one side at least
_ROWS_A_SECOND = 3e5
_MORE_PATIENCE, _MOST_PATIENCE = 3.0, 100.0
_PAUSE = 0.5  # splits for each time as many rows as usual that a failed elimination made
_SHRUNK, _HARDLY_SHRUNK = 0.8, 0.97  # where fewer of its states are left, a model is made anew, at first and at last
_MIXED, _MIXED_ROWS = (0.003, 0.05), 5e4  # parts of the bound within which mixes are looked for, and with how many rows
_SMALL = 6e-3  # the part of memory that small rows take together, which are left out at first
_COARSE = 0.5  # the part of the time that this may take
_GROWTH = 4.0  # from the step to one goal to the step to the next
_TORN = 0.1  # the part of the gap by which a split raises both bounds where each half is closed by itself
_NEARLY = 0.5  # a goal that is this part of the way to the best choice is raised to its cost

_Looked = tuple[Closed, Part, Split | None]


@dataclass
class Closer:
    """Options of a closing attempt.

    Attributes:
        tolerance: Improvements smaller than this do not matter (0.5 where all costs are whole numbers).
        deadline: `jit.clock()` at which to stop with what is there.
        effort: Most labels of a frontier search, for models that are too entangled for elimination.
        width: Most labels that it keeps after each node.
        few: Combinations of states up to which a model is eliminated as a whole.
        patience: How many times as many rows are made where splitting hardly raises the bound; grows as that fails.
        pause: Splits to make before that is tried again: they take about as long as the elimination that failed.
        splits: Whether to split at all.
        slack: The difference between a choice and its bound that will do.
        dear: How far above the bound a choice is improved before models are split.
        improve: Makes a choice cheaper, given a dual, the choice or None, the tolerance and the deadline.
        rows: Rows of the next elimination of many combinations.
        coarse: Whether small rows of memory are to be left out at first.
        cut: Whether time did not do for that, which is then done when it is gone on with.
        helped: Whether the choice and the prices were improved, which is done before models are split.
        fan: Makes the duals of each search.
    """

    tolerance: float
    deadline: float
    effort: float = _EFFORT
    width: int = _WIDTH
    few: float = _MOST_COMBINATIONS
    patience: float = 10.0
    pause: float = 0.0
    splits: bool = True
    slack: float = 0.0
    dear: float = 0.0
    improve: Callable[[Dual, np.ndarray | None, float, float], np.ndarray | None] | None = None
    rows: float = _FEWER_ROWS
    coarse: bool = False
    cut: bool = False
    helped: bool = False
    fan: Fan = field(default_factory=Fan)

    def probed(self, dual: Dual, best: Closed, cutoff: float, enough: float) -> Closed:
        """A first choice below the cutoff: read from the dual, or looked for in haste ever further above the bound."""
        if best.choice is None and not self.few:  # a search along a frontier takes longer than mending
            best = mended_found(dual, best, cutoff)
        reach = _FIRST_REACH * max(abs(dual.bound), 1e-9)
        while self.splits and best.bound < enough and clock() < self.deadline:
            if best.bound + max(reach, self.slack) >= min(best.cost, cutoff):
                break
            goal = best.bound + reach
            best = better(best, replace(self, splits=False, few=min(self.few, _PROBED)).attempt(dual, goal))
            if best.bound < goal:
                break
            reach *= _FURTHER
        return best if best.choice is not None else mended_found(dual, best, cutoff)

    def below(self, dual: Dual, best: Closed, cutoff: float, enough: float) -> Closed:
        """Looks for cheaper choices: goals just above what is proven, and further each time, up to a bound.

        Before the first goal that takes splits, the choice and the prices are improved: that leaves fewer to make.
        """
        step = 0.0
        while best.bound < min(best.cost - self.slack, cutoff - self.slack, enough):
            ceiling = min(best.cost, cutoff)
            if clock() > self.deadline:
                break
            alive = dual.floor <= ceiling
            if alive.mean() < (_HARDLY_SHRUNK if self.helped else _SHRUNK):  # for good
                best = better(best, self._below_in_part(dual, alive, best, ceiling, enough))
                break
            if self.coarse:
                best = self._coarsely(dual, best, ceiling, enough)
                if best.bound < best.cost - self.slack:
                    best = self._helped(dual, best, ceiling)
                continue
            rise = _GROWTH * step or max(_FIRST_GAP * max(abs(best.bound), 1e-9), 0.5 * (best.bound - dual.bound))
            near = best.choice is not None and rise > _NEARLY * (ceiling - best.bound)
            goal = ceiling if near else min(ceiling, best.bound + rise)
            if not self.helped:
                self.splits = False
                found = self.attempt(dual, goal)
                self.splits = True
                best = better(best, found)
                if found.bound < min(found.cost, goal):
                    best = self._helped(dual, best, ceiling)
                    continue
            else:
                best = better(best, self._last(dual, best, ceiling, enough) if near else self.attempt(dual, goal))
            step = rise
        return replace(best, bound=min(best.bound, best.cost, cutoff))

    def _below_in_part(self, dual: Dual, alive: np.ndarray, best: Closed, ceiling: float, enough: float) -> Closed:
        """`below` without the states that are not alive."""
        part = self._reduced(Part(dual), alive, ceiling)
        if isinstance(part, Closed):
            return part
        start = Closed(None, np.inf, max(part.dual.bound, best.bound - part.offset))
        held = None if best.choice is None else part.restrict(best.choice)
        if held is not None:
            start = replace(start, choice=held, cost=cost_of(part.dual.model, held))
        return part.whole(self.below(part.dual, start, ceiling - part.offset, enough - part.offset))

    def _coarsely(self, dual: Dual, best: Closed, ceiling: float, enough: float) -> Closed:
        """Looks for what is cheapest where small rows are left out, ever further above the bound; mended with them."""
        self.coarse, self.cut, goal, reach = False, True, -np.inf, _FIRST_REACH * max(abs(dual.bound), 1e-9)
        while best.bound < enough and goal < min(best.cost, ceiling) and clock() < self.deadline:
            far = best.cost > best.bound + _MIXED[-1] * abs(best.bound)
            goal, reach = min(best.cost, ceiling, best.bound + reach if far else np.inf), _FURTHER * reach
            found = self._coarsely_below(dual, goal, enough)
            best = better(best, fitted(dual, found, ceiling))
            self.cut = found.bound < goal
            if self.cut:
                break
        return best

    def _coarsely_below(self, dual: Dual, goal: float, enough: float) -> Closed:
        """What is cheaper than the goal where small rows are left out."""
        dual.restore()
        part = self._reduced(Part(dual), dual.floor <= goal, goal, coarsened(settled(dual), _SMALL))
        if isinstance(part, Closed):
            return part
        start, offset, now = Closed(None, np.inf, part.dual.bound), part.offset, clock()
        closer = replace(self, deadline=now + _COARSE * (self.deadline - now), slack=self.tolerance)
        return part.whole(closer.below(part.dual, start, goal - offset, enough - offset))

    def _helped(self, dual: Dual, best: Closed, ceiling: float) -> Closed:
        """Does once what leaves fewer splits to make: looks for a cheaper choice and for better prices."""
        self.rows, self.few = _ROWS, _MOST_COMBINATIONS if self.few else 0
        best = best if self._is_over(best) else self.mixed(dual, best, ceiling)
        best = best if self._is_over(best) else self._improved(dual, best)
        self.helped = not self._is_over(best)  # else it is done when it is gone on with
        return best

    def _is_over(self, best: Closed) -> bool:
        """Whether there is a choice to stop with, and no time left for a better one."""
        return best.choice is not None and clock() > self.deadline

    def mixed(self, dual: Dual, best: Closed, ceiling: float) -> Closed:
        """Settles the prices, and looks for the best mix of the choices that are cheapest at some, and of the best."""
        reach = min(best.cost, ceiling) - dual.bound
        if not (seen := settle_prices(dual, reach, self.deadline)):
            return best
        alive, found = states_of(dual.model, seen if best.choice is None else [best.choice, *seen]), best
        for part in _MIXED:
            goal = dual.bound + min(reach, part * abs(dual.bound))
            found = self._among(dual, alive, goal)
            if found.choice is not None or goal - dual.bound == reach:
                break
        return better(best, replace(found, bound=best.bound)) if found.cost < ceiling else best

    def _among(self, dual: Dual, alive: np.ndarray, goal: float) -> Closed:
        """A cheap choice of the states that are alive, as far as one is soon found below a goal or mended to fit."""
        closer = replace(self, fan=Fan())
        part = closer._reduced(Part(dual), alive, goal)
        if isinstance(part, Closed):
            return part
        found, _ = closer._searched(part.dual, goal - part.offset, partial(eliminate, effort=_MIXED_ROWS))
        return part.whole(mended_found(part.dual, found))

    def _improved(self, dual: Dual, best: Closed) -> Closed:
        """Makes the choice cheaper where it is dear, if that can be done."""
        if self.improve is None or best.cost <= best.bound + self.dear:
            return best
        choice = self.improve(dual, best.choice, self.tolerance, self.deadline)
        cost = np.inf if choice is None else cost_of(dual.model, choice)
        return replace(best, choice=choice, cost=cost) if cost < best.cost else best

    def _last(self, dual: Dual, best: Closed, ceiling: float, enough: float) -> Closed:
        """Searches all choices cheaper than the ceiling, or those of each half with goals of its own.

        That is where one split raises the bounds of both by much: with it the prices change, and so what is cheap.
        """
        looked = self._look(Part(dual), None, ceiling)
        halves, goal = looked[2], dual.bound + _TORN * (ceiling - dual.bound)
        if not self.few or not len(dual.model.cap) or not halves or len(halves.parts) < 2 or min(halves.bounds) < goal:
            return self.attempt(dual, ceiling, looked=looked)
        best, bounds = min(best, replace(looked[0], bound=best.bound), key=lambda it: it.cost), np.array(halves.bounds)
        for which in np.argsort(bounds, kind="stable").tolist():
            if clock() < self.deadline:
                found = self._below_in_part(dual, halves.parts[which], best, min(best.cost, ceiling), enough)
                best, bounds[which] = min(best, replace(found, bound=best.bound), key=lambda it: it.cost), found.bound
        return replace(best, bound=min(best.cost, ceiling, float(bounds.min())))

    def attempt(
        self, dual: Dual, goal: float, alive: np.ndarray | None = None, looked: _Looked | None = None
    ) -> Closed:
        """Searches all choices cheaper than the goal (of states that are alive), part by part.

        Where parts are eliminated, the one with the least bound comes first; else the better half of the last that was
        split, which leads to a choice sooner where time will not do to prove any.
        """
        best, count = Closed(None, np.inf, goal), 0
        parts: list[tuple[float, int, float, Part, np.ndarray | None]] = [(0.0, 0, dual.bound, Part(dual), alive)]
        while parts and not (count and clock() > self.deadline):
            _, _, bound, part, alive = parts[0]
            if bound >= min(best.cost, goal):
                heappop(parts)
                continue
            found, part, halves = looked or self._look(part, alive, min(best.cost, goal))
            looked = None
            best = replace(found, bound=goal) if found.cost < best.cost else best
            if halves is None or len(halves.parts) > 1:
                bound = max(bound, found.bound)
            heappop(parts)
            if halves is None:
                heappush(parts, (bound, count + 1, bound, part, alive))
                break
            for least, half in sorted(zip(halves.bounds, halves.parts, strict=True), key=lambda it: -it[0]):
                count += 1
                least = max(bound, least + part.offset)
                heappush(parts, (least if self.few else -count, count, least, part, half))
        return replace(best, bound=min([best.cost, goal, *(bound for _, _, bound, _, _ in parts)]))

    def _look(self, part: Part, alive: np.ndarray | None, goal: float) -> _Looked:
        """Searches one part for what is cheaper than the goal.

        Returns:
            What was found; what is left of the part; and the smaller ones that are to be searched instead, of which
            there are none where it was searched to the end, or None where it was not and must not be split.
        """
        nothing = Closed(None, np.inf, goal)
        if alive is not None:
            reduced = self._reduced(part, alive, goal)
            if isinstance(reduced, Closed):
                return reduced, part, NONE
            part = reduced
        dual, goal = part.dual, goal - part.offset
        most = self._most(dual, goal)
        if dual.bound > most:
            return nothing, part, NONE
        if (dual.floor <= most).mean() < _SHRUNK:
            return nothing, part, Split((dual.floor <= most,), (dual.bound,), 1.0)
        found = Closed(None, np.inf, dual.bound)
        count = self._combinations(dual, most)
        if look := self._briefly(dual, count):
            found, fewer = self._searched(dual, goal, look)
            if fewer is not None:
                return nothing, part, Split((fewer,), (dual.bound,), 1.0)
            if found.bound >= min(found.cost, goal):
                return part.whole(found), part, NONE
            self.few = _FEWER * count if self.few else 0
        if not self.splits or clock() > self.deadline:
            return part.whole(mended_found(dual, found)), part, None
        dual.restore()
        halves = split(dual, goal)
        self.pause -= 1.0
        if halves.worth < _HARDLY and self.pause < 0.0 and (look := self._patiently(count)):  # alike lumps: few rows
            more, fewer = self._searched(dual, goal, look)
            if fewer is not None:
                return nothing, part, Split((fewer,), (dual.bound,), 1.0)
            found = better(found, more)
            if found.bound >= min(found.cost, goal):
                return part.whole(found), part, NONE
            self.pause = _PAUSE * self.patience
            self.patience = min(_MORE_PATIENCE * self.patience, _MOST_PATIENCE)
        if len(halves.parts) > 1:
            found = mended_found(dual, found)
        return part.whole(found), part, halves

    def _combinations(self, dual: Dual, most: float) -> float:
        """Combinations of states in an elimination, which tell how many rows it makes; inf where none is wanted."""
        if not self.few:
            return np.inf
        return arrange(dual.links, dual.model.off, dual.floor <= most, _MOST_COMBINATIONS).combinations

    def _briefly(self, dual: Dual, count: float) -> Callable[[list[Dual], float], Found] | None:
        """A search that ends soon where it is likely to end at all; else None."""
        if count <= self.few:
            effort, self.rows = _ROWS if count <= _COMBINATIONS else self.rows, _FEWER_ROWS
            return partial(eliminate, effort=min(effort, max(_FEWER_ROWS, self._rows_left())))
        small = not self.splits or len(dual.model.cost) - dual.model.num_nodes <= _SEARCHED
        return partial(search, width=self.width, effort=self.effort) if small and not self.few else None

    def _patiently(self, count: float) -> Callable[[list[Dual], float], Found] | None:
        """A search with more effort than usual; None where elimination is wanted and stands no chance."""
        left = self._rows_left()
        if count <= _MOST_COMBINATIONS:
            return partial(eliminate, effort=min(self.patience * _PATIENT_ROWS, left))
        return None if self.few else partial(search, width=self.width, effort=min(self.patience * self.effort, left))

    def _rows_left(self) -> float:
        """How many rows can be made until the deadline."""
        return max(0.0, _ROWS_A_SECOND * (self.deadline - clock()))

    def _most(self, dual: Dual, goal: float) -> float:
        """What a choice that is cheaper than the goal costs at most."""
        return goal - self.tolerance + 1e-12 * abs(dual.bound)

    def _searched(
        self, dual: Dual, goal: float, look: Callable[[list[Dual], float], Found]
    ) -> tuple[Closed, np.ndarray | None]:
        """What a search by several duals finds; or the states that they leave, where those are much fewer."""
        most, fan = self._most(dual, goal), self.fan.around(dual, self.deadline)
        alive = np.max([one.floor for one in fan], axis=0) <= most
        if alive.mean() < _SHRUNK:
            return Closed(None, np.inf, dual.bound), alive
        found = look(fan, most)
        cost = np.inf if found.choice is None else cost_of(dual.model, found.choice)
        reached = goal if found.reached >= most else max(found.reached, dual.bound)
        return Closed(found.choice, cost, min(cost, reached)), None

    def _reduced(self, part: Part, alive: np.ndarray, goal: float, model: Model | None = None) -> Part | Closed:
        """`parts.reduced`, whose prices are noted."""
        found = reduced(part, alive, goal, self.tolerance, self.deadline, model)
        if isinstance(found, Part):
            self.fan.note(found.dual)
        return found
