"""One solve of a problem that may be giant: branch and bound for a part of the time, then search in all processes."""

from dataclasses import dataclass

import numpy as np

from meshwright.contest.anytime import Search
from meshwright.contest.tuning import SEARCH, SearchTuning
from meshwright.contest.worker import Crew
from meshwright.solver.problem.solution import Solution
from meshwright.solver.reductions.simplify import Simplified
from meshwright.solver.run import Run


@dataclass(frozen=True)
class Effort:
    """How a giant problem is searched: as `driver.solve` is given it."""

    seed: int = 0
    workers: int = 1
    steps: int | None = None
    keep_interrupted: bool = False
    tuning: SearchTuning = SEARCH


def solve_giant(
    run: Run, seconds: float, gap: float = 0.0, goal: float = np.inf, effort: Effort | None = None
) -> Solution:
    """Reduces, proves what is small, searches what is not."""
    effort = effort or Effort()
    try:
        simple = run.begin(seconds, gap, goal)
        if not simple.infeasible and not _closed(run, simple, effort.tuning):
            _search(run, simple, effort)
    except KeyboardInterrupt:
        if not effort.keep_interrupted:
            raise
    return run.finish()


def _closed(run: Run, simple: Simplified, tuning: SearchTuning) -> bool:
    """Tries to prove a small model's optimum in this process; returns whether that succeeded."""
    model = simple.model
    if len(model.cost) > tuning.solver.giant_states and model.num_nodes > tuning.solver.few_nodes:
        return False
    if len(model.cap) * len(model.cost) > tuning.solver.most_work:
        return False
    is_hard = _is_giant(run, tuning) and len(model.cap) > tuning.fewest_times
    return run.close(simple, run.deadline.part(tuning.giant_exact_share if is_hard else tuning.exact_share, least=1.0))


def _is_giant(run: Run, tuning: SearchTuning) -> bool:
    return run.problem.num_strategies > tuning.solver.giant_states


def _search(run: Run, simple: Simplified, effort: Effort) -> None:
    """The anytime search, in this process and in the crew's."""
    crew = None
    if _is_giant(run, effort.tuning) and effort.workers > 1 and effort.steps is None:
        crew = Crew(simple.model, run.tolerance, run.deadline.left, effort.seed, effort.workers, effort.tuning)

    def tell(cost: float, choice: np.ndarray) -> None:
        run.offer(simple.expand(choice))
        if crew is not None:
            crew.board.post(0, cost, choice)

    def poll() -> tuple[float, np.ndarray] | None:
        if crew is None:
            return None
        run.raise_bound(crew.board.best_bound() + simple.offset)
        search.bound = max(search.bound, run.bound - simple.offset)
        found = crew.board.best() if crew.board.best_cost() < run.cost - simple.offset else None
        if found is not None:
            run.offer(simple.expand(found[1]))
        return found

    search = Search(
        simple.model,
        run.tolerance,
        run.deadline,
        effort.seed,
        effort.steps,
        tell,
        lambda bound: run.raise_bound(bound + simple.offset),
        poll,
        lambda cost, bound: run.suffices(cost + simple.offset, bound + simple.offset),
        effort.tuning,
    )
    search.cost = run.cost - simple.offset
    try:
        search.run()
    finally:
        poll()
        if crew is not None:
            crew.close()
