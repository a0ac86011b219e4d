"""Lower bounds on problems as they are."""

import numpy as np
import pytest

from meshwright.solver import ChoiceProblem, lower_bound, solve
from meshwright.solver.warm import example
from tests.solver.layers import layered_problem
from tests.solver.problems import brute_force, random_problem


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_never_passes_the_optimum(seed):
    problem = random_problem(seed, memory=seed % 2 == 0, whole=seed % 3 == 0)
    best = brute_force(problem)
    assert lower_bound(problem) <= best


def test_the_bound_is_tight_on_layers_without_limit():
    problem = layered_problem((8, 2), layers=3)
    cost = solve(problem).cost
    assert lower_bound(problem, target=cost) == pytest.approx(cost, rel=1e-6)


def test_prices_raise_the_bound_under_a_limit():
    problem = example(True, seed=1)
    assert lower_bound(problem) >= lower_bound(problem.with_limit(None)) - 1e-6


def test_impossible_problems_have_no_finite_bound():
    assert lower_bound(ChoiceProblem(costs=[[np.inf, 1e18]])) == np.inf
