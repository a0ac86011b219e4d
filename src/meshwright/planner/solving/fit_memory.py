"""Brings one priced problem under its memory limit.

Memory is held lazily: a problem starts without limits, and the moments at which its answer would not fit are added
until it does, each with the copies that the answer makes there. Until they are added, moments and copies cost nothing,
so every bound on the way holds.

A `View` says what is to be solved; a `ViewState` is what is known of it. Neither changes: a step makes the next state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.budget import Budget
from meshwright.planner.solving.held_memory import Moments
from meshwright.planner.solving.solves import PROVEN, begin, least_memory, round_of, solves
from meshwright.planner.solving.tuning import VIEW_TUNING, ViewTuning
from meshwright.plans.search_log import Round
from meshwright.solver import Solution, price
from meshwright.solver.problem.copies import Route
from meshwright.solver.problem.gap import relative_gap
from meshwright.solver.problem.solution import Status

if TYPE_CHECKING:
    from meshwright.solver.run import Run

LESS = 1 - 1e-9  # of a cost: less is equal, by the tolerance of a solve


@dataclass(frozen=True)
class View:
    """One mesh view to be solved: its problem, bytes allowed on each device (None for no limit), and options."""

    formulation: Any  # a `Priced`
    limit: float | None
    tuning: ViewTuning = VIEW_TUNING

    @property
    def is_small(self) -> bool:
        """Whether the problem is solved with memory held throughout, rather than moment by moment."""
        return sum(map(len, self.formulation.costs)) * self.formulation.memory.num_steps <= self.tuning.small

    def fits(self, solution: Solution | None) -> bool:
        """Whether a solution has a choice that fits the memory."""
        return solution is not None and (self.limit is None or solution.peak_usage <= self.limit)


class Stage(Enum):
    """How far the solve of a view is."""

    OPEN = "no choice that fits is close to the best"
    NEAR = "a choice fits that is as close to the best as those on the way need be"
    DONE = "the solution fits and is as good as it will be"
    FAILED = "the latest step found no choice"


class _Begun(NamedTuple):
    """A solve that may be resumed while the same is held, and the nodes that it has besides the formulation's."""

    limit: float | None
    moments: Moments
    run: "Run"
    routes: list[Route]


@dataclass(frozen=True)
class ViewState:
    """What is known of a view on the way to its best choice.

    Attributes:
        view: The view.
        initial: A choice to start from as long as none fits; None for none.
        moments: Where memory is held.
        floor: No choice that keeps free what `moments` reserve costs less.
        proven: No choice that fits costs less; inf where none fits.
        free: The best solution if memory were no matter; None until it is solved.
        latest: The latest solution with a choice, which may not fit yet; the best one that fits where it is done.
        fitted: The best solution found that fits.
        stage: How far the solve is.
        worth: What a byte is worth at the moments, as far as the latest solve told.
        least_limit: The least limit that the latest solve found to suffice, where it was infeasible.
        num_advances: Steps with memory so far.
        seconds: Time spent.
        rounds: Every solve so far.
        begun: The latest solve, where it may be resumed.
    """

    view: View
    initial: NDArray[np.int64] | None = None
    moments: Moments = field(default_factory=Moments)
    floor: float = 0.0
    proven: float = 0.0
    free: Solution | None = None
    latest: Solution | None = None
    fitted: Solution | None = None
    stage: Stage = Stage.OPEN
    worth: Mapping[int, float] = field(default_factory=dict)
    least_limit: float | None = None
    num_advances: int = 0
    seconds: float = 0.0
    rounds: tuple[Round, ...] = ()
    begun: _Begun | None = None

    @property
    def formulation(self) -> Any:
        return self.view.formulation

    @property
    def is_done(self) -> bool:
        return self.stage is Stage.DONE

    @property
    def has_failed(self) -> bool:
        return self.stage is Stage.FAILED

    @property
    def fits(self) -> bool:
        """Whether the latest choice fits."""
        return self.view.fits(self.latest)

    @property
    def peak_bytes(self) -> int:
        """What the latest choice needs."""
        return 0 if self.latest is None else int(self.latest.peak_usage)

    @property
    def least_bytes(self) -> float:
        """After a step failed: a bound on the memory that suffices with what is reserved."""
        return float(self.least_limit or self.view.limit or 0.0)

    @property
    def cost(self) -> float:
        """What the best choice found that fits costs; the latest one where none does."""
        solution = self.fitted or self.latest
        assert solution is not None
        return float(solution.cost)

    @property
    def promise(self) -> float:
        """What the best choice may cost; where it is nearly known, more likely than at the least."""
        if self.stage is not Stage.NEAR:
            return self.floor
        return self.cost - self.view.tuning.still_found * (self.cost - self.floor)

    def step(self, gap: float = 0.0, goal: float = np.inf, budget: Budget | None = None) -> "ViewState":
        """Solves once, up to a gap, and notes where memory is short; it has failed where that found no choice.

        It is left as soon as the floor is no lower than the goal, then perhaps without a choice. Where nothing more is
        held than the last time, the solve is resumed.
        """
        budget = budget or Budget()
        started, begun = budget.now, self._begun()
        tuning = replace(self.view.tuning, allowances=self.allowances(goal))
        found = list(solves(begun.run, tuning, gap, goal, budget))
        rounds = (*self.rounds, *(round_of(len(self.moments.reserved), one) for one in found))
        moments = sorted(self.moments.reserved)
        worth = {moments[time]: price for time, price in begun.run.prices.items()} or self.worth
        state = replace(self, rounds=rounds, worth=worth, begun=begun)._after(found[-1], gap, goal)
        return replace(state, seconds=self.seconds + budget.now - started)

    def _begun(self) -> _Begun:
        """The solve of all that is held, resumed or new."""
        held = self.view.limit, self.moments
        if self.begun is not None and self.begun[:2] == held:
            return self.begun
        problem, routes = self.moments.problem(self.formulation, self.view.limit)
        start = self.initial if self.fitted is None else self.fitted.choice
        return _Begun(*held, begin(problem, None if start is None else _through(routes, start)), routes)

    def _after(self, solution: Solution, gap: float, goal: float) -> "ViewState":
        """What is known after a solve with `begun`."""
        assert self.begun is not None
        infeasible = solution.status is Status.INFEASIBLE  # which it may be for what is reserved
        state = replace(
            self,
            floor=self.floor if infeasible else max(self.floor, solution.lower_bound),
            proven=self._proven_by(solution),
            least_limit=solution.least_limit,
            stage=Stage.NEAR if self.stage is Stage.NEAR else Stage.OPEN,
        )
        if solution.choice is None:
            state = replace(state, stage=Stage.FAILED)
        else:
            choice = solution.choice[: len(solution.choice) - len(self.begun.routes)]
            state = state._with_choice(replace(solution, choice=choice))
            good_gap = self.view.tuning.good_gap
            suffices = gap == 0.0 or solution.status is Status.OPTIMAL
            if state.fits and (suffices or (state.is_within(good_gap) and state.floor < goal)):
                state = replace(state, stage=Stage.DONE)
        return replace(state, begun=None) if state.is_done or solution.status in PROVEN else state

    def _with_choice(self, solution: Solution) -> "ViewState":
        """Takes note of a choice: whether it fits, and where memory is short under it."""
        assert solution.choice is not None
        moments, peak = self.moments.tightened(self.formulation, solution.choice, self.view.limit)
        latest = replace(solution, peak_usage=peak)
        is_better = self.view.fits(latest) and (self.fitted is None or latest.cost <= self.fitted.cost)
        return replace(self, moments=moments, latest=latest, fitted=latest if is_better else self.fitted)

    def _proven_by(self, solution: Solution) -> float:
        """What a solve says of all choices that fit, also of those that leave less free than was reserved."""
        room = max(self.moments.reserved.values(), default=0.0)
        if not room:
            return max(self.proven, solution.lower_bound)
        too_much = (solution.least_limit or 0.0) - room > (self.view.limit or 0.0)
        return np.inf if too_much else self.proven

    def advance(self, goal: float = np.inf, budget: Budget | None = None) -> "ViewState":
        """Takes the next step towards a choice that fits, and from there to the best; failed where nothing can fit.

        The view is left as soon as the floor is no lower than the goal. When the time is over it is done with the best
        choice that fits, at worst the one that takes least memory.
        """
        budget, tuning = budget or Budget(), self.view.tuning
        state = replace(self, num_advances=self.num_advances + 1)
        if not self.num_advances and self.view.is_small and self.view.limit is not None:
            state = replace(state, moments=Moments.throughout(self.formulation))
        if budget.is_over or state.num_advances > tuning.max_rounds:
            state = replace(state, stage=Stage.FAILED)
        else:
            is_wide = self.stage is Stage.NEAR and not self.is_within(tuning.good_gap)
            state = state.step(0.0 if is_wide else tuning.near_gap, goal, budget)
        if state.has_failed:
            state = replace(state, stage=self.stage) if state.floor >= goal else state._at_last()
        is_near = state.fits and (state.floor < goal or state.is_within(tuning.near_gap))
        if state.stage is Stage.OPEN and is_near:
            state = replace(state, stage=Stage.NEAR)
        return state.settled() if state.is_done else state

    def _at_last(self) -> "ViewState":
        """Done with the best choice that fits, or with the one that takes least memory, where that does."""
        if self.fitted is not None:
            return replace(self, stage=Stage.DONE)
        if self.proven == np.inf:
            return self
        choice, peak = least_memory(self.formulation)
        found = price(self.formulation.problem({}, None), choice)
        least = Solution(Status.FEASIBLE, choice, found.cost, self.proven, peak)
        if not self.view.fits(least):
            return replace(self, latest=least)
        return replace(self, latest=least, fitted=least, stage=Stage.DONE)

    def under(self, limit: float | None) -> "ViewState":
        """The same view under another limit, with memory held where its latest choice exceeds it."""
        state = replace(self, view=replace(self.view, limit=limit), fitted=None)
        return state if self.latest is None else state._with_choice(self.latest)

    def settled(self) -> "ViewState":
        """The same with the best choice that fits for its solution, where there is one."""
        return self if self.fitted is None else replace(self, latest=self.fitted)

    def allowances(self, goal: float) -> tuple[tuple[float, float], ...]:
        """The allowances, of which the first is longer where the problem took long without memory.

        On the way to a choice that fits, any choice suffices once the first is over: it shows where more memory must be
        held, and the gap of a problem without that says nothing. There is but a part of the first for a view that is
        nearly solved, unless it is the best or its gap is still wide.
        """
        tuning = self.view.tuning
        (seconds, close), *later = tuning.allowances
        first = max(seconds, tuning.harder * (0.0 if self.free is None else self.free.seconds))
        if self.stage is not Stage.NEAR:
            is_on_the_way = bool(self.moments.reserved)
            return ((first, close), *((longer, np.inf if is_on_the_way else gap) for longer, gap in later))
        _, loosest = tuning.allowances[-1]
        if self.is_within(tuning.near_gap) or (goal < np.inf and self.is_within(loosest)):
            return ((tuning.phase_share * first, close),)
        return ((first, close), *later)

    def is_within(self, gap: float) -> bool:
        """Whether the best choice that fits is as close to the floor."""
        return relative_gap(self.cost, self.floor) <= gap


def solve_free(state: ViewState, budget: Budget | None = None) -> ViewState:
    """A view solved without memory, which bounds what it can reach; it has failed where that found no choice."""
    state = state.step(budget=budget)
    return state if state.has_failed else replace(state, floor=state.cost, free=state.latest)


def _through(routes: Sequence[Route], choice: NDArray[np.int64]) -> NDArray[np.int64]:
    """A choice with the nodes through which edges are routed."""
    return np.concatenate([choice, np.array([route.strategy(choice) for route in routes], np.int64)])
