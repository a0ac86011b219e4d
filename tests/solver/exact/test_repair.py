"""Mending: what fits afterwards is legal and no dearer, and on small problems close to the optimum."""

import numpy as np
import pytest

from meshwright.solver import solve
from meshwright.solver.bounds.dual import Dual
from meshwright.solver.bounds.memory_prices import climb_prices, relaxed
from meshwright.solver.exact.repair import repaired
from meshwright.solver.model.half_edges import link
from meshwright.solver.model.model import State, from_problem
from meshwright.solver.warm import example


def _choices(model, count, seed=0):
    draws = np.random.default_rng(seed).random((count, model.num_nodes))
    return (draws * np.diff(model.off)).astype(np.int64)


@pytest.mark.parametrize("seed", range(6))
def test_what_fits_stays_so_and_grows_no_dearer(seed):
    model = from_problem(example(True, seed=seed))
    links = link(model)
    for choice in _choices(model, 20):
        before, after = State.of(model, choice), repaired(model, links, choice)
        if before.fits(model):
            assert after.fits(model)
            assert after.cost <= before.cost


@pytest.mark.parametrize("seed", range(6))
def test_no_single_change_makes_a_mended_choice_cheaper(seed):
    model = from_problem(example(True, seed=seed))
    found = repaired(model, link(model), _choices(model, 1)[0])
    if not found.fits(model):
        return
    for node in range(model.num_nodes):
        for state in range(int(model.off[node + 1] - model.off[node])):
            other = found.choice.copy()
            other[node] = state
            there = State.of(model, other)
            assert there.cost >= found.cost - 1e-9 or not there.fits(model)


@pytest.mark.parametrize("seed", range(6))
def test_a_relaxed_choice_mends_into_one_near_the_optimum(seed):
    problem = example(True, seed=seed)
    best = solve(problem, seconds=60)
    model = from_problem(problem)
    dual = Dual(model)
    dual.converge(20)
    climb_prices(dual, 0.1 * abs(dual.bound), 60)
    dual.sweep()
    found = repaired(model, dual.links, relaxed(dual))
    if found.fits(model):
        assert best.cost <= found.cost <= 1.5 * best.cost


@pytest.mark.parametrize("seed", range(4))
def test_the_floor_of_a_state_exceeds_no_choice_that_fits_with_it(seed):
    model = from_problem(example(True, seed=seed))
    dual = Dual(model)
    dual.converge(10)
    start = dual.bound
    assert climb_prices(dual, 0.1 * abs(dual.bound), 40) >= start
    for choice in _choices(model, 300):
        state = repaired(model, dual.links, choice)
        if state.fits(model):
            assert (dual.floor[model.off[:-1] + state.choice] <= state.cost + 1e-9 * abs(state.cost)).all()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("sweeps", [1, 2, 5])
def test_floors_of_early_sweeps_hold_for_the_optimum(seed, sweeps):
    problem = example(False, num_nodes=10, seed=seed)
    best = solve(problem, seconds=60)
    model = from_problem(problem)
    dual = Dual(model)
    for _ in range(sweeps):
        dual.sweep()
    assert (dual.floor[model.off[:-1] + best.choice] <= best.cost + 1e-9).all()
