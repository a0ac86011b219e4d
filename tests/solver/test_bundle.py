"""Prices by a bundle of cheapest choices: against a linear programme over all choices of small problems."""

from itertools import product

import numpy as np
import pytest
from scipy.optimize import linprog

from meshwright.solver.bundle import highest, settle_prices
from meshwright.solver.dual import Dual, climb_prices
from meshwright.solver.model import from_problem
from meshwright.solver.problem import ChoiceProblem
from meshwright.solver.state import State

FOREVER = np.inf


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
    states = [State.of(model, np.array(choice)) for choice in product(*map(range, np.diff(model.off)))]
    rows = np.array([[1.0, *(model.cap - state.load)] for state in states])
    aim = np.array([-1.0, *np.zeros(len(model.cap))])
    found = linprog(
        aim, A_ub=rows, b_ub=[state.cost for state in states], bounds=[(None, None)] + [(0, None)] * len(model.cap)
    )
    return -found.fun, min(state.cost for state in states if state.fits(model))


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


def test_with_one_time_only_or_past_the_deadline_prices_stay():
    one, several = _several_times(0, num_times=1), _several_times(0)
    for model, deadline in ((one, FOREVER), (several, 0.0)):
        dual = Dual(model)
        dual.converge(20)
        climb_prices(dual, 0.1 * abs(dual.bound), 60)
        prices = dual.prices.copy()
        settle_prices(dual, np.inf, deadline)
        assert dual.prices == pytest.approx(prices)


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
