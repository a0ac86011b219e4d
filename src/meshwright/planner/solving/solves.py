"""Solves of one problem for as long as its allowances say, and the choice that takes least memory."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.budget import Budget
from meshwright.planner.solving.held_memory import Priced
from meshwright.planner.solving.tuning import VIEW_TUNING, ViewTuning
from meshwright.plans.search_log import Improvement, Round
from meshwright.solver import ChoiceProblem, Solution
from meshwright.solver.problem.solution import Status

if TYPE_CHECKING:
    from meshwright.solver.run import Run

PROVEN = (Status.OPTIMAL, Status.INFEASIBLE)
_EXPENSIVE = 100.0  # how much more than the step itself its memory costs where the least memory is sought


def begin(problem: ChoiceProblem, choice: NDArray[np.int64] | None = None) -> "Run":
    """A solve that starts from a choice, and can be resumed."""
    from meshwright.solver.run import Run

    return Run(problem, initial=choice)


def solves(
    run: "Run",
    tuning: ViewTuning = VIEW_TUNING,
    gap: float = 0.0,
    goal: float = np.inf,
    budget: Budget | None = None,
) -> Iterator[Solution]:
    """Solves for as long as each allowance says, until one suffices; without memory rows, the longest ones only."""
    budget = budget or Budget()
    held = len(run.problem.row_node) > 0
    longest, loosest = tuning.allowances[-1]
    allowances = [one for one in tuning.allowances if held or one[0] >= longest]
    for number, (seconds, close) in enumerate(allowances):
        if number:
            run.begin_again()  # far off, what is looked for around a better choice finds more than resuming does
        solution = run.solve(budget.of_one_solve(seconds), gap, goal)
        yield solution
        if solution.lower_bound >= goal or budget.is_over or solution.status in PROVEN:
            break
        is_close = solution.choice is not None and solution.gap <= (max(close, loosest) if gap else close)
        if is_close and (held or seconds >= longest):
            break


def round_of(num_held: int, solution: Solution) -> Round:
    """One solve as it stands in the log of a search."""

    def known(value: float) -> float | None:
        return float(value) if np.isfinite(value) else None

    steps = [Improvement(known(p.cost), known(p.lower_bound), p.seconds) for p in solution.history]
    steps.append(Improvement(known(solution.cost), known(solution.lower_bound), solution.seconds))
    progress = tuple(a for a, b in zip(steps, [*steps[1:], None], strict=True) if a != b)
    return Round(num_held, solution.status.value, progress, solution.seconds)


def least_memory(priced: Priced) -> tuple[NDArray[np.int64], int]:
    """A choice by which memory costs more than time, at every moment at which such a choice peaks; and its peak."""
    least = priced.memory.least()
    # The most expensive strategies, since on an abstract mesh the cheapest are free.
    most = [cost[np.isfinite(cost)].max() for cost in priced.costs]
    rate = _EXPENSIVE * sum(n * cost for n, cost in zip(priced.copies, most, strict=True))
    byte_prices = {least.peak_at: (rate + 1e-12) / max(least.peak_bytes, 1)}
    found: list[tuple[NDArray[np.int64], int]] = []
    for _ in range(VIEW_TUNING.max_rounds):
        problem = priced.problem({}, None, byte_prices=byte_prices)
        *_, solution = solves(begin(problem), gap=VIEW_TUNING.good_gap)
        choice = solution.choice
        assert choice is not None
        profile = priced.memory.profile(choice, priced.copies_made(choice))
        found.append((choice, profile.peak_bytes))
        if profile.peak_at in byte_prices:
            break
        byte_prices[profile.peak_at] = next(iter(byte_prices.values()))
    return min(found, key=lambda it: it[1])
