"""Elimination against every choice of small random problems, one by one."""

import numpy as np
import pytest

from meshwright.solver.bounds.dual import Dual, ascend_prices, at_prices
from meshwright.solver.bounds.unlimited_minimum import arrange
from meshwright.solver.exact.bucket_elimination import eliminate
from meshwright.solver.model.decision_order import decision_order, permuted
from meshwright.solver.model.model import Model, State, from_problem
from meshwright.solver.problem.problem import ChoiceProblem
from meshwright.solver.warm import example
from tests.solver.problems import all_states, random_problem

pytestmark = pytest.mark.slow


def _duals(model: Model, scales=(0.5, 2.0)) -> list[Dual]:
    dual = Dual(model)
    dual.converge(5)
    if len(model.cap):
        ascend_prices(dual, dual.bound + 0.2 * abs(dual.bound) + 1.0, 10)
    return [dual, *(at_prices(dual, scale * dual.prices) for scale in scales)]


def _combinations(model: Model, most: float = np.inf) -> float:
    return arrange(Dual(model).links, model.off, np.ones(len(model.cost), bool), most).combinations


def _legal(model: Model) -> list[float]:
    _, costs, left = all_states(model)
    return np.sort(costs[np.isfinite(costs) & (left >= -1e-9).all(axis=1)]).tolist()


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_the_cheapest_choice_below_a_goal_is_found_or_there_is_none(memory, whole):
    decided = 0
    for seed in range(150):
        model = from_problem(random_problem(seed, memory=memory, whole=whole))
        if not np.isfinite(model.cost).all():
            continue
        costs = _legal(model)
        goals = [costs[0] - 0.01, costs[0] + 1e-9, costs[len(costs) // 2] + 1e-9] if costs else [1e6]
        for goal in goals:
            found = eliminate(_duals(model), goal, 1e6)
            assert found.reached == goal
            if costs and costs[0] <= goal:
                state = State.of(model, found.choice)
                assert state.fits(model)
                assert state.cost == pytest.approx(costs[0], abs=1e-6)
                decided += 1
            elif found.choice is not None:  # duals may let more through than the goal does, but nothing illegal
                state = State.of(model, found.choice)
                assert state.fits(model) and state.cost > goal
    assert decided > 100


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_the_nodes_does_not_matter(seed):
    model = from_problem(example(True, num_nodes=8, num_states=3, seed=seed))
    costs = _legal(model)
    orders = [np.arange(8), np.arange(8)[::-1].copy(), decision_order(model)]
    for order in orders:
        other = permuted(model, order)
        found = eliminate(_duals(other), costs[0] + 1e-6, 1e6)
        assert State.of(other, found.choice).cost == pytest.approx(costs[0])


def test_with_little_effort_the_goal_is_lowered_to_what_was_left_out():
    lowered = proven = 0
    for seed in range(60):
        model = from_problem(example(True, num_nodes=8, num_states=4, seed=seed))
        costs = _legal(model)
        goal = costs[0] * 1.3
        for effort in (1, 300, 1000, 1e6):
            found = eliminate(_duals(model), goal, effort)
            cost = np.inf if found.choice is None else State.of(model, found.choice).cost
            assert found.reached <= goal
            assert cost >= costs[0] - 1e-9 and (np.isinf(cost) or State.of(model, found.choice).fits(model))
            assert costs[0] >= min(cost, found.reached) - 1e-9  # what it says is proven is
            lowered += found.reached < goal
            proven += goal > found.reached >= cost
        assert found.reached == goal and cost == pytest.approx(costs[0])
    assert lowered > 60 and proven > 20


def test_what_is_too_wide_proves_nothing():
    size, pairs = 40, [(u, v) for u in range(40) for v in range(u)]
    edges = [(u, v, np.array([[0.0, 1.0], [1.0, 0.0]])) for u, v in pairs]
    model = from_problem(ChoiceProblem.from_rows([np.zeros(2)] * size, edges, [], None))
    found = eliminate([_duals(model)[0]], 1e9, 1000)
    assert found.choice is None and found.reached == -np.inf


def test_apart_from_memory_parts_that_do_not_touch_cost_no_combinations():
    one = from_problem(example(False, num_nodes=6, num_states=4, seed=0))
    size = len(one.cost)
    twice = one._replace(
        off=np.concatenate([one.off, one.off[1:] + size]),
        cost=np.concatenate([one.cost, one.cost]),
        eu=np.concatenate([one.eu, one.eu + 6]).astype(np.int32),
        ev=np.concatenate([one.ev, one.ev + 6]).astype(np.int32),
        eoff=np.concatenate([one.eoff, one.eoff]),
    )
    assert _combinations(twice) == pytest.approx(2 * _combinations(one))
    assert 10 < _combinations(twice, 10) < _combinations(twice)
    cheapest = _legal(one)[0]
    found = eliminate([_duals(twice)[0]], 2 * cheapest + 1e-6, 1e6)
    assert State.of(twice, found.choice).cost == pytest.approx(2 * cheapest)
