"""solve() against brute force and HiGHS on random small problems."""

import numpy as np
import pytest

from meshwright.errors import ProblemError
from meshwright.solver import ChoiceProblem, Status, price, solve
from tests.solver.problems import brute_force, random_problem


@pytest.mark.parametrize("seed", range(60))
def test_small_problems_end_optimal_or_infeasible_as_brute_force_says(seed):
    problem = random_problem(seed, memory=seed % 4 != 0, whole=seed % 2 == 0)
    best = brute_force(problem)
    solution = solve(problem, seconds=20)
    if np.isinf(best):
        assert solution.status == Status.INFEASIBLE
        assert solution.choice is None
        return
    assert solution.status == Status.OPTIMAL
    checked = price(problem, solution.choice)
    assert checked.legal
    assert checked.cost == pytest.approx(best, rel=1e-12)
    assert solution.cost == checked.cost
    assert solution.peak_usage == checked.peak_usage
    assert solution.lower_bound <= solution.cost


def test_bad_arguments_are_named():
    problem = ChoiceProblem(costs=[[1.0]])
    with pytest.raises(ProblemError, match="seconds is 0"):
        solve(problem, seconds=0)
    with pytest.raises(ProblemError, match="workers is 0"):
        solve(problem, workers=0)
    with pytest.raises(ProblemError, match="problem is list"):
        solve([1])
