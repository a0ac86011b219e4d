"""Prices by bundles of sweeps and of cheapest choices: against linear programmes over all choices."""

import numpy as np
import pytest
from scipy.optimize import linprog

from meshwright.solver.bounds.dual import Dual
from meshwright.solver.bounds.memory_prices import Bundle, climb_prices, highest, settle_prices
from meshwright.solver.deadline import NEVER, Deadline
from meshwright.solver.model.model import State, from_problem
from meshwright.solver.problem.problem import ChoiceProblem
from tests.solver.problems import all_states

pytestmark = pytest.mark.slow

FOREVER = NEVER


def _several_times(seed, num_nodes=8, num_states=3, num_times=4):
    """Nodes that save memory at some times for some cost, linked in a row, with limits that bind at all times."""
    rng = np.random.default_rng(seed)
    saved = np.arange(num_states)[::-1] / (num_states - 1)
    costs = [rng.uniform(1, 10) * (1 - saved) ** 2 + rng.random(num_states) for _ in range(num_nodes)]
    edges = [(u, u + 1, 2 * rng.random((num_states, num_states))) for u in range(num_nodes - 1)]
    rows = [(u, t, t + 1, rng.uniform(0, 10) * saved) for u in range(num_nodes) for t in range(num_times)]
    most = [sum(row[3].max() for row in rows if row[1] == t) for t in range(num_times)]
    rows = [(u, t, end, usage * (most[0] / most[t])) for u, t, end, usage in rows]
    return from_problem(ChoiceProblem.from_rows(costs, edges, rows, 0.5 * most[0]))


def _highest_bound(model):
    """The most that the least priced cost of a choice can be, over all prices."""
    _, costs, left = all_states(model)
    rows = np.column_stack([np.ones(len(costs)), left])
    aim = np.array([-1.0, *np.zeros(len(model.cap))])
    found = linprog(aim, A_ub=rows, b_ub=costs, bounds=[(None, None)] + [(0, None)] * len(model.cap))
    return -found.fun, costs[(left >= -1e-9).all(axis=1)].min()


def test_prices_are_settled_where_the_bound_is_highest():
    before, after = [], []
    for seed in range(12):
        model = _several_times(seed)
        dual = Dual(model)
        dual.converge(20)
        climb_prices(dual, 0.1 * abs(dual.bound), 10)
        most, optimum = _highest_bound(model)
        start = dual.bound
        settle_prices(dual, np.inf, FOREVER)
        assert start <= dual.bound <= most + 1e-9 <= optimum + 2e-9
        assert (dual.prices >= 0).all() and (dual.price == dual.prices).all()
        before.append(most - start)
        after.append(most - dual.bound)
    assert sum(after) < 0.1 * sum(before)


def test_past_the_deadline_prices_stay():
    dual = Dual(_several_times(0))
    dual.converge(20)
    climb_prices(dual, 0.1 * abs(dual.bound), 60)
    prices = dual.prices.copy()
    assert settle_prices(dual, np.inf, Deadline(0.0)) == []
    assert dual.prices == pytest.approx(prices)


@pytest.mark.parametrize("num_times", [1, 4])
def test_choices_that_settle_the_prices_are_cheapest_at_some(num_times):
    """All that is returned is cheapest at the prices it was made for: none at the best prices is below the bound."""
    for seed in range(6):
        model = _several_times(seed, num_times=num_times)
        dual = Dual(model)
        dual.converge(20)
        climb_prices(dual, 0.1 * abs(dual.bound), 40)
        most, _ = _highest_bound(model)
        states = [State.of(model, choice) for choice in settle_prices(dual, np.inf, FOREVER)]
        priced = [state.cost + float(dual.prices @ (state.load - model.cap)) for state in states]
        assert dual.bound - 1e-9 <= min(priced) <= most + 1e-3 * abs(most)
        assert any(state.fits(model) for state in states)  # at dear prices, if not before


def test_prices_climb_close_to_the_highest_bound():
    left, before = [], []
    for seed in range(12):
        model = _several_times(seed)
        dual = Dual(model)
        dual.converge(10)
        start = dual.bound
        assert climb_prices(dual, 0.03 * abs(start), 60) == dual.bound >= start
        most, optimum = _highest_bound(model)
        assert dual.bound <= most + 1e-9 <= optimum + 2e-9
        assert (dual.prices >= 0).all() and (dual.price == dual.prices).all()
        left.append(most - dual.bound)
        before.append(most - start)
    assert sum(left) < 0.05 * sum(before)


def test_prices_stop_climbing_at_the_target_and_where_nothing_binds():
    dual = Dual(_several_times(1))
    dual.converge(10)
    start, target = dual.bound, dual.bound + 1e-3 * abs(dual.bound)
    assert climb_prices(dual, 0.03 * abs(start), 60, target) >= target
    roomy = dual.model._replace(cap=100 * dual.model.cap)
    free = Dual(roomy)
    free.converge(10)
    climb_prices(free, 0.03 * abs(free.bound), 60)
    assert not free.prices.any()


def _least_of(rng, num_prices):
    """A concave function, the least of twenty planes, and its highest value over prices of at least 0."""
    slopes, bases = rng.normal(size=(20, num_prices)) - 0.3, rng.uniform(5, 6, 20)

    def look(prices):
        plane = int(np.argmin(bases + slopes @ prices))
        return float(bases[plane] + slopes[plane] @ prices), slopes[plane]

    rows = np.hstack([np.ones((20, 1)), -slopes])
    aim = np.array([-1.0, *np.zeros(num_prices)])
    return look, -linprog(aim, A_ub=rows, b_ub=bases, bounds=[(None, None)] + [(0, None)] * num_prices).fun


@pytest.mark.parametrize("num_prices", [1, 2, 5])
def test_a_bundle_finds_where_a_function_is_highest(num_prices):
    rng = np.random.default_rng(num_prices)
    for _ in range(10):
        look, most = _least_of(rng, num_prices)
        start = np.ones(num_prices)
        first = look(start)[0]
        bundle = Bundle(start, *look(start), step=0.1)
        for _ in range(40):
            prices = bundle.ask()
            bundle.tell(prices, *look(prices))
        assert first <= bundle.best <= most + 1e-9
        assert bundle.best == pytest.approx(look(bundle.center)[0]) == pytest.approx(most)


def test_what_was_said_when_the_function_was_lower_promises_no_loss():
    bundle = Bundle(np.ones(2), 1.0, np.array([1.0, -1.0]), step=0.5)
    bundle.tell(np.array([1.5, 0.5]), 3.0, np.array([0.2, 0.1]))  # above what the first said was possible
    bundle.ask()
    assert bundle.best == 3.0 and bundle.promised >= 0.0


@pytest.mark.parametrize("seed", range(8))
def test_no_prices_near_by_are_higher_by_the_model(seed):
    rng = np.random.default_rng(seed)
    slopes, values = rng.normal(size=(6, 3)), rng.normal(size=6)
    center, step = np.maximum(rng.normal(size=3), 0), 0.7

    def worth(prices):
        return (values + slopes @ (prices - center)).min() - ((prices - center) ** 2).sum() / (2 * step)

    found = highest(slopes, values, center, step, 1000)
    assert (found >= 0).all()
    for _ in range(300):
        other = np.maximum(found + rng.normal(size=3) * 10 ** rng.uniform(-4, 0), 0)
        assert worth(other) <= worth(found) + 1e-6


def test_a_part_in_which_no_memory_is_left_has_no_prices():
    dual = Dual(from_problem(ChoiceProblem(costs=[[1, 2], [0, 5]], edges=[(0, 1, [[9, 0], [0, 9]])])))
    dual.converge(5)
    assert settle_prices(dual, 1.0, FOREVER) == []
