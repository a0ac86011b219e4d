"""The door of the solver: `solve` takes a problem and returns its best choice with a certificate."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from meshwright.errors import ProblemError
from meshwright.solver.problem.problem import ChoiceProblem
from meshwright.solver.problem.solution import Progress, Solution
from meshwright.solver.tuning import TUNING, Tuning


def solve(
    problem: ChoiceProblem,
    seconds: float = 60,
    on_progress: Callable[[Progress], None] | None = None,
    initial: Sequence[int] | np.ndarray | None = None,
    gap: float = 0.0,
    goal: float = math.inf,
    tuning: Tuning = TUNING,
) -> Solution:
    """Finds the cheapest choice that fits the memory limit, by branch and bound in this process.

    Problems too large for that are left with a bound and the choice that was met; `contest.solve` searches them.

    Args:
        problem: What to solve.
        seconds: Wall-clock limit.
        on_progress: Called with a `Progress` whenever the best cost or the bound improves.
        initial: A choice to start from; ignored where it is not legal.
        gap: The gap (`Solution.gap`) that suffices: the solve goes on for as long again as it took to get there, since
            a better choice or the proof is often near. 0 to go on until the choice is proven.
        goal: A cost from which on choices are of no use: the search ends once it is proven that none is cheaper.
        tuning: Numbers that change how soon and how well a problem is solved, never whether the answer is right.

    Examples:
        >>> problem = ChoiceProblem(costs=[[1, 2], [0, 5]], edges=[(0, 1, [[9, 0], [0, 9]])])
        >>> solution = solve(problem)
        >>> str(solution.status), solution.cost, solution.choice.tolist()
        ('optimal', 2.0, [1, 0])
    """
    check_arguments(problem, seconds, gap, goal)
    from meshwright.solver.run import Run

    return Run(problem, on_progress, initial, tuning).solve(seconds, gap, goal)


def check_arguments(problem: ChoiceProblem, seconds: float, gap: float, goal: float) -> None:
    """Refuses arguments of a solve that cannot be meant."""
    if not isinstance(problem, ChoiceProblem):
        raise ProblemError(f"problem is {type(problem).__name__}: give a ChoiceProblem")
    if not seconds > 0:
        raise ProblemError(f"seconds is {seconds!r}: give a positive time limit")
    if not 0 <= gap < 1:
        raise ProblemError(f"gap is {gap!r}: give a part of the lower bound from 0 up to 1, such as 0.01")
    if math.isnan(goal):
        raise ProblemError(f"goal is {goal!r}: give a cost, or inf for none")
