"""First choices: legal, never dearer than what they came from, and the same every time."""

import numpy as np
import pytest

from meshwright.solver.bounds.dual import Dual
from meshwright.solver.bounds.memory_prices import climb_prices
from meshwright.solver.deadline import NEVER, Deadline
from meshwright.solver.exact import resumable
from meshwright.solver.exact.branch_and_bound import Closer, Options
from meshwright.solver.exact.repair import mended
from meshwright.solver.local_search.polish import improved
from meshwright.solver.model.choice import State, cost_of
from meshwright.solver.model.half_edges import link
from meshwright.solver.model.model import from_problem
from meshwright.solver.problem.problem import ChoiceProblem
from meshwright.solver.tuning import Tuning
from meshwright.solver.warm import example

FOREVER = NEVER


def lumps(num_nodes: int = 60, seed: int = 0) -> ChoiceProblem:
    """A grid of alike nodes, each of which saves time for memory, with room for half of them and a bit."""
    rng = np.random.default_rng(seed)
    costs = [[10.0, 3.0] for _ in range(num_nodes)]
    edges = [(i, j, rng.random((2, 2))) for i in range(num_nodes) for j in (i + 1, i + 6) if j < num_nodes]
    rows = [(i, 0, 1, [0.0, 7.0]) for i in range(num_nodes)]
    return ChoiceProblem.from_rows(costs, edges, rows, 7.0 * (num_nodes // 2) + 3.0)


def _priced(model) -> Dual:
    dual = Dual(model)
    dual.converge(20)
    climb_prices(dual, 0.1 * abs(dual.bound), 60)
    return dual


@pytest.mark.parametrize("seed", range(6))
def test_a_choice_that_fits_becomes_one_that_fits_and_is_no_dearer(seed):
    model = from_problem(example(True, seed=seed))
    draws = np.random.default_rng(seed).random((20, model.num_nodes))
    for draw in draws:
        before = mended(model, link(model), (draw * np.diff(model.off)).astype(np.int64))
        if before.fits(model):
            after = State.of(model, improved(_priced(model), before.choice, 1e-9, FOREVER))
            assert after.fits(model)
            assert after.cost <= before.cost


def test_a_choice_is_found_where_none_is_given_and_again_the_same():
    model = from_problem(lumps())
    dual = _priced(model)
    first, second = (improved(dual, None, 1e-9, FOREVER) for _ in range(2))
    assert first is not None and second is not None
    assert (first == second).all()
    assert State.of(model, first).fits(model)


@pytest.mark.parametrize("seed", range(4))
def test_a_poor_choice_is_improved_to_within_two_percent_of_the_bound(seed):
    model = from_problem(lumps(seed=seed))
    dual = _priced(model)
    poor = np.zeros(model.num_nodes, dtype=np.int64)  # no memory used at all
    assert cost_of(model, improved(dual, poor, 1e-9, FOREVER)) <= 1.02 * dual.bound < 0.8 * cost_of(model, poor)


def test_without_time_the_given_choice_comes_back_or_better():
    model = from_problem(lumps())
    poor = np.zeros(model.num_nodes, dtype=np.int64)
    found = improved(_priced(model), poor, 1e-9, Deadline.after(0.0))
    assert State.of(model, found).fits(model)
    assert cost_of(model, found) <= cost_of(model, poor)


@pytest.mark.slow
def test_a_choice_is_improved_before_the_first_split_and_not_where_none_is_needed(monkeypatch):
    told, cut = [], Closer._look

    def look(closer, *args):
        found = cut(closer, *args)
        if found[2] is not None and len(found[2].parts) == 2:
            told.append("split")
        return found

    def improve(dual, choice, tolerance, deadline, tuning):
        told.append("improved")
        return improved(dual, choice, tolerance, deadline, tuning)

    def closed(model, **tuning):
        told.clear()
        options = Options(1e-9, improve=improve, tuning=Tuning(improve_gap=-1.0, **tuning))
        return resumable.close(options, model), tuple(told)

    monkeypatch.setattr(Closer, "_look", look)
    models = [from_problem(example(True, num_nodes=16, seed=seed)) for seed in range(12)]
    easy = [closed(model) for model in models]
    hard = [closed(model, rows=0.0) for model in models]
    for (found, _), (other, order) in zip(easy, hard, strict=True):
        assert other.cost == pytest.approx(found.cost) and other.bound == pytest.approx(other.cost)
        assert "split" not in order or order[0] == "improved"
    assert sum("split" in order for _, order in hard) > 2 and sum(not order for _, order in easy) > 2
