"""Branch and bound on a small model: dual bounds, reduced-cost fixing, bucket elimination, and splits where that fails.

Small rows of memory are left out at first: this relaxation is solved quickly, and its optimum mostly fits.
Goals rise from just above the lower bound: states and subproblems with a bound above the goal are ruled out, so that
few states are left and eliminations are short. Below one goal the subproblem with the least bound is eliminated or
split first (best first), so that a goal far above the optimum takes little longer than the optimum itself would.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from typing import Any

import numpy as np

from meshwright.solver.bounds.dual import Dual, reparametrised
from meshwright.solver.bounds.memory_prices import settle_prices
from meshwright.solver.bounds.nearby_prices import Fan
from meshwright.solver.bounds.unlimited_minimum import arrange
from meshwright.solver.deadline import NEVER, Deadline
from meshwright.solver.exact.branching import NONE, Split, split
from meshwright.solver.exact.bucket_elimination import Found, eliminate
from meshwright.solver.exact.subproblem import (
    Closed,
    Part,
    better,
    coarsened,
    fitted,
    reduced,
    repaired_found,
    states_of,
)
from meshwright.solver.model.model import Model, cost_of
from meshwright.solver.tuning import TUNING, Tuning

_Processed = tuple[Closed, Part, Split | None]


@dataclass(frozen=True)
class Options:
    """Options of a branch and bound.

    Attributes:
        tolerance: Improvements smaller than this do not matter (0.5 where all costs are whole numbers).
        tuning: All other numbers.
        splits: Whether to split at all.
    """

    tolerance: float
    tuning: Tuning = TUNING
    splits: bool = True


@dataclass
class Effort:
    """The state of a branch and bound: what was done, and how much to spend on what comes next.

    Attributes:
        short_combinations: Combinations of states up to which the next model is eliminated as a whole.
        rows: Rows of the next elimination of many combinations.
        patience: How many times as many rows are made where splits hardly raise the bound; squared once that failed.
        pause: Splits to make before that is tried again: one for each unit of the patience that did not suffice.
        slack: The difference between a choice and its bound that suffices.
        relaxation_first: Whether small rows of memory are to be left out at first.
        relaxation_interrupted: Whether the time did not suffice for that, which is then done when the solve is resumed.
        is_incumbent_improved: Whether the choice and the prices were improved, which is done before models are split.
        fan: Makes the duals of each search.
    """

    short_combinations: float
    rows: float
    patience: float
    fan: Fan
    pause: float = 0.0
    slack: float = 0.0
    relaxation_first: bool = False
    relaxation_interrupted: bool = False
    is_incumbent_improved: bool = False


class BranchAndBound:
    """Branch and bound on one model: finds its cheapest choice, or stops at the deadline with a bound.

    Args:
        options: What is wanted.
        deadline: When to stop with what is there.
        effort: The state; None for a new one.
    """

    def __init__(self, options: Options, deadline: Deadline = NEVER, effort: Effort | None = None):
        self.options, self.deadline, self.tuning = options, deadline, options.tuning
        self.effort = effort or Effort(self.tuning.rows, self.tuning.trial_rows, self.tuning.patience, Fan(self.tuning))

    def copy(self, deadline: Deadline | None = None, splits: bool | None = None, **effort: Any) -> "BranchAndBound":
        """Another that starts with this one's state, but for what is given."""
        options = self.options if splits is None else replace(self.options, splits=splits)
        return BranchAndBound(options, deadline or self.deadline, replace(self.effort, **effort))

    def close_gap(self, dual: Dual, best: Closed, cutoff: float, enough: float) -> Closed:
        """Looks for cheaper choices: goals just above what is proven, and further each time, up to a bound.

        Before the first goal that takes splits, the choice and the prices are improved: that leaves fewer to make.
        """
        step = 0.0
        while best.bound < min(best.cost - self.effort.slack, cutoff - self.effort.slack, enough):
            ceiling = min(best.cost, cutoff)
            if self.deadline.is_over:
                break
            alive = dual.floor <= ceiling
            if alive.mean() < self.tuning.shrunk:
                best = better(best, self._close_gap_of_rest(dual, alive, best, ceiling, enough))
                break
            if self.effort.relaxation_first:
                best = self._solve_relaxation(dual, best, ceiling, enough)
                if best.bound < best.cost - self.effort.slack:
                    best = self._improve_incumbent(dual, best, ceiling)
                continue
            rise = self.tuning.goal_growth * step or max(
                self.tuning.first_goal * max(abs(best.bound), 1e-9), 0.5 * (best.bound - dual.bound)
            )
            is_last = best.choice is not None and self.tuning.goal_growth * rise > ceiling - best.bound
            goal = ceiling if is_last else min(ceiling, best.bound + rise)  # the next would be the incumbent's cost
            if not self.effort.is_incumbent_improved:
                found = self._without_branching(dual, goal)
                best = better(best, found)
                if found.bound < min(found.cost, goal):
                    best = self._improve_incumbent(dual, best, ceiling)
                    continue
            else:
                best = better(best, self.best_first(dual, goal))
            step = rise
        return replace(best, bound=min(best.bound, best.cost, cutoff))

    def _without_branching(self, dual: Dual, goal: float) -> Closed:
        """An attempt without splits; what it learns of its effort stays."""
        search = BranchAndBound(replace(self.options, splits=False), self.deadline, self.effort)
        return search.best_first(dual, goal)

    def _close_gap_of_rest(self, dual: Dual, alive: np.ndarray, best: Closed, ceiling: float, enough: float) -> Closed:
        """`close_gap` without the states that are not alive."""
        part = self._reduced(Part(dual), alive, ceiling)
        if isinstance(part, Closed):
            return part
        start = Closed(None, np.inf, max(part.dual.bound, best.bound - part.offset))
        held = None if best.choice is None else part.restrict(best.choice)
        if held is not None:
            start = replace(start, choice=held, cost=cost_of(part.dual.model, held))
        return part.whole(self.close_gap(part.dual, start, ceiling - part.offset, enough - part.offset))

    def _solve_relaxation(self, dual: Dual, best: Closed, ceiling: float, enough: float) -> Closed:
        """Solves the relaxation without small rows at rising goals, and repairs its optimum to fit with them."""
        self.effort.relaxation_first, self.effort.relaxation_interrupted, goal, reach = (
            False,
            True,
            -np.inf,
            self.tuning.first_goal * max(abs(dual.bound), 1e-9),
        )
        while best.bound < enough and goal < min(best.cost, ceiling) and not self.deadline.is_over:
            far = best.cost > best.bound + self.tuning.minima_reach * abs(best.bound)
            goal, reach = (
                min(best.cost, ceiling, best.bound + reach if far else np.inf),
                self.tuning.goal_growth * reach,
            )
            found = self._relaxation_below(dual, goal, enough)
            best = better(best, fitted(dual, found, ceiling, self.tuning))
            self.effort.relaxation_interrupted = found.bound < goal
            if self.effort.relaxation_interrupted:
                break
        return best

    def _relaxation_below(self, dual: Dual, goal: float, enough: float) -> Closed:
        """Searches the relaxation without small rows below the goal."""
        dual.restore()
        part = self._reduced(
            Part(dual), dual.floor <= goal, goal, coarsened(reparametrised(dual), self.tuning.small_memory)
        )
        if isinstance(part, Closed):
            return part
        start, offset = Closed(None, np.inf, part.dual.bound), part.offset
        search = self.copy(slack=self.options.tolerance)
        return part.whole(search.close_gap(part.dual, start, goal - offset, enough - offset))

    def _improve_incumbent(self, dual: Dual, best: Closed, ceiling: float) -> Closed:
        """Improves the incumbent and the prices, once, so that fewer splits are needed."""
        self.effort.rows = self.effort.short_combinations = self.tuning.rows
        best = best if self._is_over(best) else self.mix_minima(dual, best, ceiling)
        self.effort.is_incumbent_improved = not self._is_over(best)  # else it is done when the solve is resumed
        return best

    def _is_over(self, best: Closed) -> bool:
        """Whether there is a choice to stop with, and no time left for a better one."""
        return best.choice is not None and self.deadline.is_over

    def mix_minima(self, dual: Dual, best: Closed, ceiling: float) -> Closed:
        """Optimises the prices, and finds the best mix of the incumbent and of the choices met on the way."""
        reach = min(best.cost, ceiling) - dual.bound
        if not (seen := settle_prices(dual, reach, self.deadline, self.tuning)):
            return best
        alive = states_of(dual.model, seen if best.choice is None else [best.choice, *seen])
        found = self._restricted_to(dual, alive, dual.bound + min(reach, self.tuning.minima_reach * abs(dual.bound)))
        return better(best, replace(found, bound=best.bound)) if found.cost < ceiling else best

    def _restricted_to(self, dual: Dual, alive: np.ndarray, goal: float) -> Closed:
        """A choice of the states that are alive, if one is found quickly below a goal or can be repaired to fit."""
        search = self.copy(fan=Fan(self.tuning))
        part = search._reduced(Part(dual), alive, goal)
        if isinstance(part, Closed):
            return part
        found, _ = search._eliminated(
            part.dual, goal - part.offset, partial(eliminate, effort=self.tuning.trial_rows, tuning=self.tuning)
        )
        return part.whole(repaired_found(part.dual, found, tuning=self.tuning))

    def best_first(self, dual: Dual, goal: float) -> Closed:
        """Searches all choices cheaper than the goal, the least bound first."""
        best, count = Closed(None, np.inf, goal), 0
        parts: list[tuple[float, int, Part, np.ndarray | None]] = [(dual.bound, 0, Part(dual), None)]
        while parts and not (count and self.deadline.is_over):
            bound, _, part, alive = parts[0]
            if bound >= min(best.cost, goal):
                heappop(parts)
                continue
            found, part, halves = self._process_node(part, alive, min(best.cost, goal))
            best = replace(found, bound=goal) if found.cost < best.cost else best
            if halves is None or len(halves.parts) > 1:
                bound = max(bound, found.bound)
            heappop(parts)
            if halves is None:
                heappush(parts, (bound, count + 1, part, alive))
                break
            for least, half in sorted(zip(halves.bounds, halves.parts, strict=True), key=lambda it: -it[0]):
                count += 1
                heappush(parts, (max(bound, least + part.offset), count, part, half))
        return replace(best, bound=min([best.cost, goal, *(bound for bound, *_ in parts)]))

    def _process_node(self, part: Part, alive: np.ndarray | None, goal: float) -> _Processed:
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
        most = self._highest_cost(dual, goal)
        if dual.bound > most:
            return nothing, part, NONE
        if (dual.floor <= most).mean() < self.tuning.shrunk:
            return nothing, part, Split((dual.floor <= most,), (dual.bound,), 1.0)
        found = Closed(None, np.inf, dual.bound)
        count = self._combinations(dual, most)
        if look := self._short_elimination(count):
            found, fewer = self._eliminated(dual, goal, look)
            if fewer is not None:
                return nothing, part, Split((fewer,), (dual.bound,), 1.0)
            if found.bound >= min(found.cost, goal):
                return part.whole(found), part, NONE
            self.effort.short_combinations = self.tuning.shrunk * count
        if not self.options.splits or self.deadline.is_over:
            return part.whole(repaired_found(dual, found, tuning=self.tuning)), part, None
        dual.restore()
        halves = split(dual, goal, self.tuning)
        self.effort.pause -= 1.0
        is_hardly_worth_it = halves.worth * self.tuning.patience < 1.0  # then as many splits would not close the gap
        if is_hardly_worth_it and self.effort.pause < 0.0 and (look := self._long_elimination(count)):
            more, fewer = self._eliminated(dual, goal, look)
            if fewer is not None:
                return nothing, part, Split((fewer,), (dual.bound,), 1.0)
            found = better(found, more)
            if found.bound >= min(found.cost, goal):
                return part.whole(found), part, NONE
            self.effort.pause = self.effort.patience
            self.effort.patience = self.tuning.patience**2
        if len(halves.parts) > 1:
            found = repaired_found(dual, found, tuning=self.tuning)
        return part.whole(found), part, halves

    def _combinations(self, dual: Dual, most: float) -> float:
        """Combinations of states in an elimination, which tell how many rows it makes."""
        alive, tuning = dual.floor <= most, self.tuning
        return arrange(dual.links, dual.model.off, alive, tuning.rows, tuning.few_nodes).combinations

    def _short_elimination(self, count: float) -> Callable[[list[Dual], float], Found] | None:
        """An elimination, where it is expected to be short; else None."""
        if count > self.effort.short_combinations:
            return None
        few = self.tuning.trial_rows
        effort, self.effort.rows = self.tuning.rows if count <= few else self.effort.rows, few
        return partial(eliminate, effort=min(effort, max(few, self._rows_left())), tuning=self.tuning)

    def _long_elimination(self, count: float) -> Callable[[list[Dual], float], Found] | None:
        """An elimination with more rows than usual; None where even those would not suffice."""
        if count > self.tuning.rows:
            return None
        rows = min(self.effort.patience * self.tuning.trial_rows, self._rows_left())
        return partial(eliminate, effort=rows, tuning=self.tuning)

    def _rows_left(self) -> float:
        """How many rows can be made until the deadline."""
        return self.tuning.rows_per_second * self.deadline.left

    def _highest_cost(self, dual: Dual, goal: float) -> float:
        """What a choice that is cheaper than the goal costs at most."""
        return goal - self.options.tolerance + 1e-12 * abs(dual.bound)

    def _eliminated(
        self, dual: Dual, goal: float, look: Callable[[list[Dual], float], Found]
    ) -> tuple[Closed, np.ndarray | None]:
        """What a search by several duals finds; or the states that they leave, where those are much fewer."""
        most, fan = self._highest_cost(dual, goal), self.effort.fan.around(dual, self.deadline)
        alive = np.max([one.floor for one in fan], axis=0) <= most
        if alive.mean() < self.tuning.shrunk:
            return Closed(None, np.inf, dual.bound), alive
        found = look(fan, most)
        cost = np.inf if found.choice is None else cost_of(dual.model, found.choice)
        reached = goal if found.reached >= most else max(found.reached, dual.bound)
        return Closed(found.choice, cost, min(cost, reached)), None

    def _reduced(self, part: Part, alive: np.ndarray, goal: float, model: Model | None = None) -> Part | Closed:
        """`subproblem.reduced`, whose prices are noted."""
        found = reduced(part, alive, goal, self.options.tolerance, self.deadline, model, self.tuning)
        if isinstance(found, Part):
            self.effort.fan.note(found.dual)
        return found
