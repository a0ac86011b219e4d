"""solve() against brute force and HiGHS on random small problems."""

import numpy as np
import pytest

from meshwright.errors import ProblemError
from meshwright.solver import ChoiceProblem, Status, price, solve
from meshwright.solver.warm import example
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


def test_a_solve_up_to_a_gap_stops_there_with_a_true_bound():
    stopped = 0
    for seed in (0, 1, 3, 4, 5):
        problem = example(True, num_nodes=14, num_states=5, seed=seed)
        proven, near = solve(problem, seconds=20), solve(problem, seconds=20, gap=0.2)
        assert proven.status == Status.OPTIMAL
        assert near.gap <= 0.2
        assert price(problem, near.choice).legal
        assert near.lower_bound <= proven.cost <= near.cost
        stopped += near.status == Status.FEASIBLE
    assert stopped


def test_bad_arguments_are_named():
    problem = ChoiceProblem(costs=[[1.0]])
    with pytest.raises(ProblemError, match="seconds is 0"):
        solve(problem, seconds=0)
    with pytest.raises(ProblemError, match="workers is 0"):
        solve(problem, workers=0)
    with pytest.raises(ProblemError, match="gap is 2"):
        solve(problem, gap=2)
    with pytest.raises(ProblemError, match="problem is list"):
        solve([1])
