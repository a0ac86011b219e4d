"""Brings one priced problem under its memory limit.

Memory is held lazily: a problem starts without limits, and the moments at which its answer would not fit are added
until it does, each with the copies that the answer makes there. Until they are added, moments and copies cost nothing,
so every bound on the way holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.budget import Budget
from meshwright.planner.solving.tuning import VIEW_TUNING, ViewTuning
from meshwright.plans.search_log import Improvement, Round
from meshwright.priced.copies import Copied, EdgeKey, Route, Spans, find_routes
from meshwright.priced.problem import Usage
from meshwright.solver import ChoiceProblem, Solution, price
from meshwright.solver.problem.gap import relative_gap
from meshwright.solver.problem.solution import Status

if TYPE_CHECKING:
    from meshwright.solver.run import Run

_EXPENSIVE = 100.0  # how much more than the step itself its memory costs where the least memory is sought
_ROUNDS = 4  # solves in which it is sought
_PROVEN = (Status.OPTIMAL, Status.INFEASIBLE)


class Priced(Protocol):
    """A problem with the memory that its choices take: a `Formulation`, or what a saved plan keeps of one."""

    @property
    def copies(self) -> Sequence[float]: ...

    @property
    def costs(self) -> Sequence[NDArray[np.float64]]: ...

    @property
    def memory(self) -> Usage: ...

    @property
    def copied(self) -> Mapping[EdgeKey, Copied]: ...

    def problem(
        self,
        times: Mapping[int, float],
        limit: float | None,
        routes: Mapping[EdgeKey, Route] = ...,
        byte_prices: Mapping[int, float] = ...,
    ) -> ChoiceProblem: ...

    def copies_made(self, choice: NDArray[np.int64]) -> Spans: ...


@dataclass
class View:
    """One mesh view on the way to its best choice.

    Attributes:
        formulation: Its problem.
        limit: Bytes allowed on each device; None for no limit.
        floor: No choice that keeps free what `times` says costs less.
        proven: No choice that fits costs less; inf where none fits.
        free: The best solution if memory were no matter; None until it is solved.
        times: Moments at which memory is held, with bytes kept free there for what no edge copies, such as results.
        edges: Edges whose copies are held at these moments.
        worth: What a byte is worth at these moments, as far as the latest solve told.
        solution: The latest solution; its choice may not fit yet.
        peak_bytes: What that choice needs.
        is_near: Whether a choice fits that is as close to the best as those on the way need be.
        done: Whether the latest solution fits and is as good as it will be.
        seconds: Time spent.
        tuning: Options, among them how long to try.
        budget: The time that is left for it.
        initial: A choice to start from: the one that was given, then the last that fitted; None for none.
        rounds: Every solve so far.
    """

    formulation: Any  # a `Priced`
    limit: float | None
    floor: float = 0.0
    proven: float = 0.0
    free: Solution | None = None
    times: dict[int, float] = field(default_factory=dict)
    edges: set[EdgeKey] = field(default_factory=set)
    worth: dict[int, float] = field(default_factory=dict)
    solution: Solution | None = None
    peak_bytes: int = 0
    is_near: bool = False
    done: bool = False
    seconds: float = 0.0
    tuning: ViewTuning = VIEW_TUNING
    budget: Budget = field(default_factory=Budget)
    initial: NDArray[np.int64] | None = None
    rounds: list[Round] = field(default_factory=list)
    _fitted: Solution | None = None
    _num_advances: int = 0
    _begun: "tuple[object, Run, list[Route]] | None" = None  # what is held, its solve, if that may go on, its routes

    @property
    def fits(self) -> bool:
        return self.solution is not None and (self.limit is None or self.peak_bytes <= self.limit)

    @property
    def cost(self) -> float:
        """What the best choice found that fits costs; the latest one where none does."""
        solution = self.fitted or self.solution
        assert solution is not None
        return float(solution.cost)

    @property
    def fitted(self) -> Solution | None:
        """The best solution found that fits."""
        found = self._fitted
        return None if found is None or (self.limit is not None and found.peak_usage > self.limit) else found

    @property
    def is_taken_up(self) -> bool:
        """Whether it was solved with memory."""
        return self._num_advances > 0

    @property
    def promise(self) -> float:
        """What the best choice may cost; where it is nearly known, more likely than at the least."""
        return self.cost - self.tuning.still_found * (self.cost - self.floor) if self.is_near else self.floor

    def advance(self, goal: float = np.inf) -> bool:
        """Takes the next step towards a choice that fits, and from there to the best; False where nothing can fit.

        The view is left as soon as the floor is no lower than the goal. When the time is over it is done with the best
        choice that fits, at worst the one that takes least memory.
        """
        self._num_advances += 1
        if self._num_advances == 1 and self.is_small and self.limit is not None:
            self.hold_throughout()
        gap = 0.0 if self.is_near and not self._is_within(self.tuning.good_gap) else self.tuning.near_gap
        found = not self.budget.is_over and self._num_advances <= self.tuning.max_rounds and self.step(gap, goal)
        if not found and self.floor < goal:
            found = self.done = self.fitted is not None or self.squeeze()
        if self.fitted is not None:
            self.is_near |= self.floor < goal or self._is_within(self.tuning.near_gap)
        if self.done:
            self.settle()
        return found or self.floor >= goal

    def settle(self) -> None:
        """Takes the best choice that fits for its solution, where there is one."""
        if self.fitted is not None:
            self.solution, self.peak_bytes = self.fitted, int(self.fitted.peak_usage)

    @property
    def is_small(self) -> bool:
        """Whether the problem is solved with memory held throughout, rather than moment by moment."""
        return sum(map(len, self.formulation.costs)) * self.formulation.memory.num_steps <= self.tuning.small

    def step(self, gap: float = 0.0, goal: float = np.inf) -> bool:
        """Solves once, up to a gap, and notes where memory is short; False where nothing can fit.

        It is left as soon as the floor is no lower than the goal, then perhaps without a choice. Where nothing more is
        held than the last time, the solve goes on from there.
        """
        started = self.budget.now
        run, routes = self._run()
        for solution in _solves(run, replace(self.tuning, allowances=self._allowed(goal)), gap, goal, self.budget):
            self.rounds.append(_round(len(self.times), solution))
        moments = sorted(self.times)
        self.worth = {moments[time]: price for time, price in run.prices.items()} or self.worth
        if solution.status != Status.INFEASIBLE:  # which it may be for what is kept free
            self.floor = max(self.floor, solution.lower_bound)
        self._prove(solution)
        if solution.choice is not None:
            choice = solution.choice[: len(solution.choice) - len(routes)]
            self.hold(choice)
            self.solution = replace(solution, choice=choice, peak_usage=self.peak_bytes)
            if self.fits and (self.fitted is None or solution.cost <= self.cost):
                self._fitted = self.solution
        will_do = gap == 0.0 or solution.status == Status.OPTIMAL
        self.done = self.fits and (will_do or (self._is_within(self.tuning.good_gap) and self.floor < goal))
        if self.done or solution.status in _PROVEN:
            self._begun = None
        self.seconds += self.budget.now - started
        self._least = solution.least_limit
        return solution.choice is not None

    def _run(self) -> "tuple[Run, list[Route]]":
        """The solve of all that is held, begun or to be gone on with, and the nodes besides the formulation's."""
        held = self.limit, dict(self.times), set(self.edges)
        if self._begun is None or self._begun[0] != held:
            problem, routes = self.problem()
            if self.fitted is not None:
                self.initial = self.fitted.choice
            start = None if self.initial is None else _through(routes, self.initial)
            self._begun = held, _begin(problem, start), routes
        return self._begun[1], self._begun[2]

    def _allowed(self, goal: float) -> tuple[tuple[float, float], ...]:
        """The allowances, of which the first is longer where the problem took long without memory.

        There is but a part of it for a view that is nearly solved, unless it is the best and its gap is still wide.
        """
        (seconds, close), *later = self.tuning.allowances
        free = 0.0 if self.free is None else self.free.seconds
        first = max(seconds, self.tuning.harder * free)
        if self.is_near and (goal < np.inf or self._is_within(self.tuning.near_gap)):
            return ((self.tuning.last * first, close),)
        return ((first, close), *later)

    def _is_within(self, gap: float) -> bool:
        """Whether the best choice that fits is as close to the floor."""
        return relative_gap(self.cost, self.floor) <= gap

    def problem(self) -> tuple[ChoiceProblem, list[Route]]:
        """The problem with all that is held, and the nodes that it has besides those of the formulation."""
        routes = find_routes(self.formulation.copied, self.edges, self.times) if self.edges else {}
        limit = self.limit if self.times else None
        return self.formulation.problem(self.times, limit, routes), list(routes.values())

    def _prove(self, solution: Solution) -> None:
        """Notes what a solve says of choices that leave less free than it kept."""
        room = max(self.times.values(), default=0.0)
        if not room:
            self.proven = max(self.proven, solution.lower_bound)
        elif (solution.least_limit or 0.0) - room > (self.limit or 0.0):  # too much even so
            self.proven = np.inf

    @property
    def least_bytes(self) -> float:
        """After `step` failed: a bound on the memory that suffices with what `times` keeps free."""
        return float(self._least or self.limit or 0.0)

    def squeeze(self) -> bool:
        """Takes the choice that needs least memory, if it fits; what `times` keeps free may ask for too much."""
        choice, self.peak_bytes = least_memory(self.formulation)
        found = price(self.formulation.problem({}, None), choice)
        self.solution = Solution(Status.FEASIBLE, choice, found.cost, self.proven, self.peak_bytes)
        self._fitted = self.solution if self.fits else None
        return self.fits

    def hold_throughout(self) -> None:
        """Holds memory at every moment that may be the fullest, with all that edges copy."""
        from meshwright.solver.model.model import maximal_times

        live = [copied.live for copied in self.formulation.copied.values()]
        begin = [self.formulation.memory.start, *(some.start for some in live), *(some.ahead for some in live)]
        end = [self.formulation.memory.stop, *(some.stop for some in live), *(some.stop for some in live)]
        start, stop = np.concatenate(begin), np.concatenate(end)
        moments, *_ = maximal_times(start[start < stop], stop[start < stop])
        self.times = dict.fromkeys(moments.tolist(), 0.0)
        self.edges = set(self.formulation.copied)

    def hold(self, choice: NDArray[np.int64]) -> None:
        """Notes what a choice needs, and where memory is short under it."""
        copies = self.formulation.copies_made(choice)
        profile = self.formulation.memory.profile(choice, copies)
        self.peak_bytes = profile.peak_bytes
        if self.limit is None or self.peak_bytes <= self.limit:
            return
        before = dict(self.times), set(self.edges)
        for moment in peaks(profile.bytes_at, np.floor(self.limit)):
            made = self._made_at(choice, moment)
            self.edges |= made.keys()
            rest = copies.bytes_at(moment) - sum(made.values())
            self.times[moment] = max(self.times.get(moment, 0.0), rest if rest >= 1 else 0.0)
        if (self.times, self.edges) == before:  # all that is held fits, yet the peak does not: keep more free there
            self.times[profile.peak_at] += self.peak_bytes - self.limit

    def _made_at(self, choice: NDArray[np.int64], moment: int) -> dict[EdgeKey, float]:
        """The edges that copy something at a moment, and how many bytes."""
        found = {}
        for key, copied in self.formulation.copied.items():
            made = copied.made_by(choice[key[0]], choice[key[2]])
            if made is not None and (size := made.bytes_at(moment)):
                found[key] = size
        return found


def _through(routes: Sequence[Route], choice: NDArray[np.int64]) -> NDArray[np.int64]:
    """A choice with the nodes that edges are laid through."""
    return np.concatenate([choice, np.array([route.strategy(choice) for route in routes], np.int64)])


def least_memory(formulation: Priced) -> tuple[NDArray[np.int64], int]:
    """A choice that holds memory dearer than time, at every moment at which such a choice peaks; and its peak."""
    least = formulation.memory.least()
    # The most expensive strategies, since on an abstract mesh the cheapest are free.
    rate = _EXPENSIVE * sum(n * cost.max() for n, cost in zip(formulation.copies, formulation.costs, strict=True))
    byte_prices = {least.peak_at: (rate + 1e-12) / max(least.peak_bytes, 1)}
    found: list[tuple[NDArray[np.int64], int]] = []
    for _ in range(_ROUNDS):
        *_, solution = _solves(_begin(formulation.problem({}, None, byte_prices=byte_prices)))
        choice = solution.choice
        assert choice is not None
        profile = formulation.memory.profile(choice, formulation.copies_made(choice))
        found.append((choice, profile.peak_bytes))
        if profile.peak_at in byte_prices:
            break
        byte_prices[profile.peak_at] = next(iter(byte_prices.values()))
    return min(found, key=lambda it: it[1])


def _begin(problem: ChoiceProblem, choice: NDArray[np.int64] | None = None) -> "Run":
    from meshwright.solver.run import Run

    return Run(problem, initial=choice)


def _solves(
    run: "Run",
    tuning: ViewTuning = VIEW_TUNING,
    gap: float = 0.0,
    goal: float = np.inf,
    budget: Budget | None = None,
) -> Iterator[Solution]:
    """Solves for as long as each allowance says, until one suffices; without memory rows, the long ones only."""
    budget = budget or Budget()
    held = len(run.problem.row_node) > 0
    allowances = [one for one in tuning.allowances if held or one[0] >= tuning.long_s] or tuning.allowances
    for number, (seconds, close) in enumerate(allowances):
        if number:
            run.begin_again()  # far off, what is looked for around a better choice finds more than going on does
        solution = run.solve(budget.of_one_solve(seconds), gap, goal)
        yield solution
        if solution.lower_bound >= goal or budget.is_over:
            break
        if solution.status in _PROVEN or (
            solution.gap <= max(close, tuning.far_off * gap) and (held or seconds >= tuning.long_s)
        ):
            break


def _round(num_held: int, solution: Solution) -> Round:
    def known(value: float) -> float | None:
        return float(value) if np.isfinite(value) else None

    steps = [Improvement(known(p.cost), known(p.lower_bound), p.seconds) for p in solution.history]
    steps.append(Improvement(known(solution.cost), known(solution.lower_bound), solution.seconds))
    progress = tuple(a for a, b in zip(steps, [*steps[1:], None], strict=True) if a != b)
    return Round(num_held, solution.status.value, progress, solution.seconds)


def peaks(bytes_at: NDArray[np.float64], limit: float) -> list[int]:
    """The highest moment of each stretch that is over the limit, the worst two: with more, problems are harder."""
    over = np.flatnonzero(bytes_at > limit)
    stretches = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    tops = sorted((int(s[np.argmax(bytes_at[s])]) for s in stretches if len(s)), key=lambda t: -bytes_at[t])
    return tops[:2]
