"""The door of the search for giant problems: `solve` proves what is small and searches what is not."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from meshwright.contest.tuning import SEARCH, SearchTuning
from meshwright.errors import ProblemError
from meshwright.solver.driver import check_arguments
from meshwright.solver.problem.problem import ChoiceProblem
from meshwright.solver.problem.solution import Progress, Solution


def solve(
    problem: ChoiceProblem,
    seconds: float = 60,
    seed: int = 0,
    workers: int = 2,
    on_progress: Callable[[Progress], None] | None = None,
    initial: Sequence[int] | np.ndarray | None = None,
    steps: int | None = None,
    keep_interrupted: bool = True,
    gap: float = 0.0,
    goal: float = math.inf,
    tuning: SearchTuning = SEARCH,
) -> Solution:
    """Finds the cheapest choice that fits the memory limit.

    Small problems end `optimal` at once, in this process. Giant ones are searched until the time is up; Ctrl-C ends the
    search early with the best so far. With one worker and `steps`, the result depends on the arguments alone.

    Args:
        problem: What to solve.
        seconds: Wall-clock limit.
        seed: Seed of the random search.
        workers: Processes that search a giant problem together.
        on_progress: Called with a `Progress` whenever the best cost or the bound improves.
        initial: A choice to start from; ignored where it is not legal.
        steps: Most rounds of random search per worker; None for no such limit.
        keep_interrupted: Whether Ctrl-C ends the search with the best so far, rather than being raised.
        gap: The gap (`Solution.gap`) that suffices: a problem that is small enough to be closed is searched for as long
            again as it took to get there, since a better choice or the proof is often near. 0 to go on until the choice
            is proven.
        goal: A cost from which on choices are of no use: the search ends once it is proven that none is cheaper.
        tuning: Numbers that change how soon and how well a problem is solved, never whether the answer is right.

    Examples:
        >>> problem = ChoiceProblem(costs=[[1, 2], [0, 5]], edges=[(0, 1, [[9, 0], [0, 9]])])
        >>> solution = solve(problem)
        >>> str(solution.status), solution.cost, solution.choice.tolist()
        ('optimal', 2.0, [1, 0])
    """
    check_arguments(problem, seconds, gap, goal)
    if workers < 1:
        raise ProblemError(f"workers is {workers!r}: give 1 or more")
    from meshwright.contest.giant import Effort, solve_giant
    from meshwright.solver.run import Run

    run = Run(problem, on_progress, initial, tuning.solver)
    return solve_giant(run, seconds, gap, goal, Effort(seed, workers, steps, keep_interrupted, tuning))
