"""One solve from beginning to end: reductions, then branch and bound until the optimum is proven or the time is up."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from meshwright.jit import clock
from meshwright.solver.deadline import Deadline
from meshwright.solver.exact.branch_and_bound import Options
from meshwright.solver.exact.resumable import ResumableSolve, close
from meshwright.solver.model.model import extent, from_problem, maximal_times
from meshwright.solver.problem import validate
from meshwright.solver.problem.check import price
from meshwright.solver.problem.gap import relative_gap
from meshwright.solver.problem.problem import IMPOSSIBLE, ChoiceProblem
from meshwright.solver.problem.solution import Progress, Solution, Status
from meshwright.solver.reductions.simplify import Simplified, simplify
from meshwright.solver.tuning import TUNING, Tuning


class Run:
    """What is known of one problem: its incumbent, the lower bound, the deadline, the history of the latest solve."""

    def __init__(
        self,
        problem: ChoiceProblem,
        on_progress: Callable[[Progress], None] | None = None,
        initial: Sequence[int] | np.ndarray | None = None,
        tuning: Tuning = TUNING,
        clock: Callable[[], float] = clock,
    ):
        """As `driver.solve` is given them; the clock tells the time in seconds."""
        self.tuning, self.deadline = tuning, Deadline(clock=clock)
        self.start = self.deadline.now
        self.problem = problem
        self.gap, self.goal = 0.0, np.inf
        self.on_progress = on_progress
        self.choice: np.ndarray | None = None
        self.cost = np.inf
        self.peak = 0.0
        self.bound = -np.inf
        self.history: list[Progress] = []
        extents = [extent(part, IMPOSSIBLE) for part in (problem.cost, problem.matrix)]
        self.is_whole = all(whole for *_, whole in extents)  # then what is not half a unit cheaper is not cheaper
        self.tolerance = 0.5 if self.is_whole else rounding(problem, extents)
        self.most = most_possible(problem, extents) + self.tolerance
        self._simple: Simplified | None = None
        self._resumable: ResumableSolve | None = None
        if initial is not None:
            self.offer(np.asarray(initial))

    def solve(self, seconds: float, gap: float = 0.0, goal: float = np.inf) -> Solution:
        """Solves for so many seconds; called again, it resumes."""
        simple = self.begin(seconds, gap, goal)
        if not simple.infeasible:
            self.close(simple, self.deadline)
        return self.finish()

    def begin(self, seconds: float, gap: float = 0.0, goal: float = np.inf) -> Simplified:
        """Sets the deadline, and reduces the problem unless that was done."""
        if self._simple is not None:
            self.start, self.history = self.deadline.now, []
        self.deadline, self.gap, self.goal = replace(self.deadline, at=self.start + seconds), gap, goal
        if self._simple is None:
            self._simple = simplify(from_problem(self.problem), self.deadline, self.tuning)
        return self._simple

    def close(self, simple: Simplified, until: Deadline) -> bool:
        """Branch and bound on the reduced problem, from where it was left; returns whether nothing is left to gain."""
        if self._resumable is None:
            known = None if self.choice is None else simple.restrict(self.choice)
            options = Options(self.tolerance, self.tuning)
            self._resumable = ResumableSolve(
                options, simple.model, self.cost - simple.offset, known=known, offset=simple.offset
            )
        found = self._resumable.resume(until, self.gap, min(self.goal, self.most) - simple.offset)
        if found.choice is not None:
            self.offer(simple.expand(found.choice))
        self.raise_bound(found.bound + simple.offset)
        return self.suffices(self.cost, self.bound)

    @property
    def prices(self) -> dict[int, float]:
        """What a byte is worth at the times at which memory binds, as far as closing the problem told."""
        if self._resumable is None:
            return {}
        times, *_ = maximal_times(self.problem.row_start, self.problem.row_end)
        return {int(times[time]): price for time, price in self._resumable.prices.items() if price > 0.0}

    def begin_again(self) -> None:
        """Lets the next solve start afresh from the choice so far."""
        self._resumable = None

    def suffices(self, cost: float, bound: float) -> bool:
        """Whether a solve may end with such a cost and bound."""
        if bound >= self.goal or bound > self.most:
            return True
        return bound >= cost - self.tolerance or relative_gap(cost, bound) <= self.gap if np.isfinite(cost) else False

    def offer(self, choice: np.ndarray) -> bool:
        """Takes a choice of the full problem if it is legal and the cheapest so far; the checker has the last word."""
        found = price(self.problem, choice)
        if not found.legal or found.cost >= self.cost:
            return False
        self.choice, self.cost, self.peak = np.array(choice, dtype=np.int64), found.cost, found.peak_usage
        self._tell()
        return True

    def raise_bound(self, bound: float) -> None:
        if bound > self.bound:
            self.bound = bound
            self._tell()

    def finish(self) -> Solution:
        """The best so far, with its certificate."""
        if self._simple is not None and self._simple.infeasible:
            return self._finish_infeasible(self._simple.excess)
        if self.choice is None and self.bound > self.most:  # whatever fits would cost more than anything can
            return self._finish_infeasible(0.0)
        if self.choice is None:
            status = Status.NO_SOLUTION_FOUND
        elif self.bound >= self.cost - self.tolerance * (1 + 1e-9):
            status, self.bound = Status.OPTIMAL, self.cost
        else:
            status = Status.FEASIBLE
            if self.is_whole:  # bounds hold up to the tolerance
                self.bound = float(np.ceil(self.bound - self.tolerance))
        return self._solution(status, min(self.bound, self.cost), None)

    def _finish_infeasible(self, excess: float) -> Solution:
        """Ends without a choice, with the least limit that suffices as far as the time allows to find it."""
        self.choice, self.cost, least = None, np.inf, None
        if np.isfinite(self.problem.limit):
            until = self.deadline.part(self.tuning.bisection_share, least=1.0)
            least = least_limit(self.problem, excess, until, self.tuning)
        return self._solution(Status.INFEASIBLE, np.inf, least)

    def _solution(self, status: Status, bound: float, least_limit: float | None) -> Solution:
        return Solution(
            status=status,
            choice=self.choice,
            cost=self.cost,
            lower_bound=bound,
            peak_usage=self.peak,
            least_limit=least_limit,
            seconds=self.deadline.now - self.start,
            history=tuple(self.history),
        )

    def _tell(self) -> None:
        progress = Progress(self.deadline.now - self.start, self.cost, min(self.bound, self.cost), self.peak)
        self.history.append(progress)
        if self.on_progress is not None:
            self.on_progress(progress)


def most_possible(problem: ChoiceProblem, extents: list[tuple[float, float, bool]]) -> float:
    """No choice without impossible strategies and pairs costs more; extents are those of costs and of matrices."""
    counts = (problem.num_nodes, problem.num_edges)
    return float(sum(n * max(most, 0.0) for n, (_, most, _) in zip(counts, extents, strict=True))) * (1 + 1e-9)


def rounding(problem: ChoiceProblem, extents: list[tuple[float, float, bool]]) -> float:
    """What sums of costs may be off by: a 1e-11th of the size of the costs."""
    least = np.minimum.reduceat(np.minimum(problem.cost, IMPOSSIBLE), problem.first[:-1])
    scale = float(np.abs(least[least < IMPOSSIBLE]).sum())
    return 1e-11 * max(scale, *(max(-low, high) for low, high, _ in extents), 1e-300)


def least_limit(problem: ChoiceProblem, excess: float, deadline: Deadline, tuning: Tuning = TUNING) -> float | None:
    """The least limit that suffices, or a lower bound on it where the time does not suffice.

    Args:
        problem: A problem without a choice under its limit.
        excess: By how much the limit is known to be too low.
        deadline: When to stop.
        tuning: Options.

    Returns:
        The limit, or None where impossible strategies and pairs rule out every choice whatever the limit.
    """
    free = _without_costs(problem)
    found, _ = _fitting(free, np.inf, deadline, tuning)
    if found is None:
        return None if not deadline.is_over else problem.limit + excess
    low, high = problem.limit + excess, price(free, found).peak_usage
    whole = bool((problem.usage == np.floor(problem.usage)).all())
    low = np.ceil(low) if whole else low
    while high - low > (0.5 if whole else 1e-9 * high) and not deadline.is_over:
        middle = np.floor((low + high) / 2) if whole else (low + high) / 2
        found, needed = _fitting(free, middle, deadline, tuning)
        if found is not None:
            high = min(middle, price(free, found).peak_usage)
        elif not deadline.is_over:
            low = max(middle + 1 if whole else middle, middle + needed)
    return float(high) if high - low <= (0.5 if whole else 1e-9 * high) else float(low)


def _fitting(free: ChoiceProblem, limit: float, deadline: Deadline, tuning: Tuning) -> tuple[np.ndarray | None, float]:
    """A choice that fits a limit, or None and by how much the limit is too low at least."""
    simple = simplify(from_problem(free.with_limit(limit)), deadline, tuning)
    if simple.infeasible:
        return None, simple.excess
    closed = close(Options(0.5, tuning=tuning), simple.model, deadline=deadline)
    return (None, 0.0) if closed.choice is None else (simple.expand(closed.choice), 0.0)


def _without_costs(problem: ChoiceProblem) -> ChoiceProblem:
    """The same problem with every possible strategy and pair at cost 0."""
    cost = np.where(problem.cost >= IMPOSSIBLE, np.inf, 0.0)
    matrix = np.where(problem.matrix >= IMPOSSIBLE, np.inf, 0.0)
    edges = validate.Edges(problem.edge_nodes, problem.edge_matrix, problem.matrix_first, matrix)
    rows = validate.MemoryRows(problem.row_node, problem.row_start, problem.row_end, problem.row_first, problem.usage)
    return ChoiceProblem.from_arrays(problem.first, cost, edges, rows, problem.limit)
