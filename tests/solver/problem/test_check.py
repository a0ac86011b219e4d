"""The independent pricer on hand-made answers."""

import numpy as np
import pytest

from meshwright.solver import ChoiceProblem, price


@pytest.fixture
def problem():
    return ChoiceProblem(
        costs=[[1, 2], [0, 1e18]],
        usages=[[4, 1], [3, 3]],
        intervals=[(0, 2), (2, 3)],
        edges=[(0, 1, [[5, 0], [np.inf, 0]])],
        limit=3,
    )


def test_peak_counts_half_open_intervals(problem):
    assert price(problem, [0, 0]).peak_usage == 4
    assert price(problem.with_limit(4), [0, 0]).legal


def test_too_much_memory_is_a_fault(problem):
    found = price(problem, [0, 0])
    assert (found.cost, found.legal) == (6, False)
    assert "exceeds the limit" in found.fault


def test_impossible_choices_cost_inf(problem):
    assert price(problem, [1, 0]).cost == np.inf
    assert price(problem, [0, 1]).cost == np.inf
    assert not price(problem.with_limit(None), [0, 1]).legal


def test_wrong_choices_are_named(problem):
    assert "2 nodes" in price(problem, [0]).fault
    assert "node 1 has no strategy 2" in price(problem, [0, 2]).fault
