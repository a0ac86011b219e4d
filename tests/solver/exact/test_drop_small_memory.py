"""Small rows of memory left out: a relaxation by no more than was said, and the whole is still solved exactly."""

import numpy as np
import pytest

from meshwright.solver import ChoiceProblem, Status, price, solve
from meshwright.solver.bounds.dual import Dual
from meshwright.solver.exact.branch_and_bound import BranchAndBound, Options
from meshwright.solver.exact.subproblem import Closed, coarsened
from meshwright.solver.model.model import State, from_problem
from meshwright.solver.reductions.times import dense_usage
from meshwright.solver.tuning import Tuning
from tests.solver.problems import all_states, brute_force, random_problem

pytestmark = pytest.mark.slow


def _large_and_small(seed, num_nodes=7, num_states=3):
    """Nodes that trade cost for memory, half of them a thousand times less of it, close to the limit."""
    rng = np.random.default_rng(seed)
    size = np.where(np.arange(num_nodes) % 2, 1e-3, 1.0)
    costs = [np.sort(rng.random(num_states)) for _ in range(num_nodes)]
    edges = [(u, v, 0.2 * rng.random((num_states, num_states))) for u, v in ((0, 1), (1, 2), (2, 3), (4, 5), (3, 5))]
    rows = [
        (u, start, end, size[u] * np.sort(rng.random(num_states))[::-1])
        for u in range(num_nodes)
        for start, end in ((0, 1), (1, 3))
    ]
    model = from_problem(ChoiceProblem.from_rows(costs, edges, rows, 1.0))
    loads = 1.0 - all_states(model)[2].min(axis=1)
    return ChoiceProblem.from_rows(costs, edges, rows, float(np.sort(loads)[len(loads) // 3]))


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3])
def test_what_fits_still_fits_and_nothing_else_by_more_than_a_part(part):
    dropped = 0
    for seed in range(40):
        model = from_problem(random_problem(seed, memory=True))
        coarse = coarsened(model, part)
        dropped += len(model.rnode) - len(coarse.rnode)
        (_, cost, left), (_, coarse_cost, room) = all_states(model), all_states(coarse)
        assert (cost == coarse_cost).all()
        assert (room >= left - 1e-9).all() and (room <= left + part * model.cap + 1e-9).all()
    assert dropped > 10


def test_the_smallest_rows_are_left_out_first():
    model = from_problem(_large_and_small(0))
    coarse = coarsened(model, 0.01)
    assert set(coarse.rnode.tolist()) == {0, 2, 4, 6}
    spread = np.ptp(dense_usage(model)[:, : model.off[1]], axis=1)
    assert (spread > 0.01 * model.cap).all()


@pytest.mark.parametrize("seed", range(30))
def test_problems_with_small_rows_are_solved_exactly(seed):
    problem = _large_and_small(seed)
    solution = solve(problem, seconds=60)
    assert solution.status == Status.OPTIMAL
    assert price(problem, solution.choice).legal
    assert price(problem, solution.choice).cost == pytest.approx(brute_force(problem), rel=1e-9)


def test_it_needs_no_choice_to_begin_with_and_mends_what_does_not_fit():
    options, proven, repaired = Options(1e-9, tuning=Tuning(small_memory=0.01)), 0, 0
    for seed in range(40):
        problem = _large_and_small(seed)
        dual = Dual(from_problem(problem))
        dual.converge(10)
        start, best = Closed(None, np.inf, dual.bound), brute_force(problem)
        found = BranchAndBound(options)._solve_relaxation(dual, start, np.inf, np.inf)
        assert best - 0.3 < found.bound <= best + 1e-9
        if found.choice is not None:
            state = State.of(dual.model, found.choice)
            assert state.fits(dual.model) and state.cost == pytest.approx(found.cost) and state.cost >= best - 1e-9
            proven += found.bound >= found.cost - 1e-9
            repaired += found.bound < found.cost - 1e-9
    assert proven > 5 and repaired > 2


def test_what_is_cheapest_without_small_rows_is_mostly_the_answer_and_never_trusted_without(monkeypatch):
    """Both kinds occur: it fits and proves the optimum, or it does not and is no more than a bound."""
    told, coarsely = [], BranchAndBound._relaxation_below

    def tell(search, dual, goal, enough):
        found = coarsely(search, dual, goal, enough)
        if found.choice is not None:
            told.append(State.of(dual.model, found.choice).fits(dual.model))
        return found

    monkeypatch.setattr(BranchAndBound, "_relaxation_below", tell)
    monkeypatch.setattr(
        BranchAndBound, "mix_minima", lambda search, dual, best, ceiling: best
    )  # no choice is known beforehand
    tuning = Tuning(small_memory=0.01, first_goal=1e-9)
    for seed in range(30):
        problem = _large_and_small(seed)
        solution = solve(problem, seconds=60, tuning=tuning)
        assert solution.status == Status.OPTIMAL
        assert solution.cost == pytest.approx(brute_force(problem), rel=1e-9)
    assert True in told and False in told
