"""The anytime search: legal, repeatable, never past its deadline by much, and workers that share their best."""

import numpy as np
import pytest

from meshwright.contest import giant, solve
from meshwright.contest.anytime import Level, Search
from meshwright.contest.decimation import decimate
from meshwright.contest.moves import Neighbourhood
from meshwright.contest.tuning import SearchTuning
from meshwright.contest.worker import Board
from meshwright.errors import ProblemError
from meshwright.solver import ChoiceProblem, price
from meshwright.solver.bounds.dual import Dual
from meshwright.solver.deadline import NEVER
from meshwright.solver.model.model import State, from_problem
from meshwright.solver.reductions.simplify import simplify
from meshwright.solver.tuning import Tuning
from meshwright.solver.warm import example


def _forever():
    return NEVER


@pytest.fixture(scope="module")
def problem():
    return example(True, num_nodes=40, num_states=4, seed=2)


@pytest.fixture(scope="module")
def simple(problem):
    return simplify(from_problem(problem))


def _search(simple, seed=0, steps=30):
    found = Search(simple.model, 0.5, _forever(), seed, steps)
    found.run()
    return found


def test_the_same_seed_and_steps_give_the_same_choice(simple):
    first, second = _search(simple), _search(simple)
    assert first.cost == second.cost
    assert first.choice.tolist() == second.choice.tolist()


def test_the_search_agrees_with_the_exact_solver(problem, simple):
    found = _search(simple, steps=40)
    checked = price(problem, simple.expand(found.choice))
    assert checked.legal
    assert checked.cost == found.cost + simple.offset
    best = solve(problem, seconds=4, workers=1)
    assert best.lower_bound <= checked.cost
    assert found.bound + simple.offset <= best.cost


def test_decimation_fits_and_windows_only_improve(simple):
    dual = Dual(simple.model)
    dual.converge(20)
    choice = decimate(simple.model, dual.prices, _forever())
    state = State.of(simple.model, choice)
    assert state.fits(simple.model)
    around = Neighbourhood(simple.model, 0.5, seed=1)
    around.charge(dual.prices)
    before = state.cost
    for _ in range(20):
        around.step(state, _forever())
        assert state.cost <= before
        assert state.fits(simple.model)
        before = state.cost
    again = State.of(simple.model, state.choice)
    assert (again.cost, again.load.tolist()) == (state.cost, state.load.tolist())


def test_a_mix_is_no_dearer_than_either_choice_and_fits(simple):
    model, random = simple.model, np.random.default_rng(0)
    around = Neighbourhood(model, 0.5, seed=1)
    around.charge(np.full(len(model.cap), 1.0))
    first, second = (_search(simple, seed, steps=1).choice for seed in (0, 1))
    for _ in range(20):
        state = State.of(model, first)
        drawn = (random.random(model.num_nodes) * np.diff(model.off)).astype(np.int64)
        other = np.where(random.random(model.num_nodes) < 0.2, drawn, second)  # mostly too dear, or impossible
        least = min(known.cost for known in (state, State.of(model, other)) if known.fits(model))
        around.mix(state, other, _forever())
        assert state.fits(model)
        assert state.cost <= least
        assert ((state.choice == first) | (state.choice == other)).all()


def test_levels_lead_up_and_down(simple):
    level = Level.top(simple.model)
    level.dual.sweep()
    choice = _search(simple).choice
    alive = np.ones(len(simple.model.cost), dtype=np.uint8)
    alive[simple.model.off[0] : simple.model.off[1]] = 0
    alive[simple.model.off[0] + choice[0]] = 1
    below = level.below(alive, _forever())
    known = below.restrict(choice)
    if known is not None:
        up = below.expand(known)
        assert State.of(below.model, known).cost + below.offset == State.of(simple.model, up).cost


def test_ctrl_c_keeps_the_best_so_far(problem, simple, monkeypatch):
    known = simple.expand(_search(simple).choice)

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "run", interrupted)
    monkeypatch.setattr(giant, "_closed", lambda *_: False)
    solution = solve(problem, seconds=30, workers=1, initial=known)
    assert solution.status == "feasible"
    assert solution.choice.tolist() == known.tolist()
    assert solve(problem, seconds=30, workers=1).status == "no_solution_found"


def test_an_initial_choice_is_kept_unless_beaten():
    problem = ChoiceProblem(costs=[[3, 1]], usages=[[0, 5]], intervals=[(0, 1)], limit=5)
    solution = solve(problem, initial=[0])
    assert solution.history[0].cost == 3
    assert solution.cost == 1


def test_the_board_gives_the_cheapest_whole_choice(tmp_path):
    board = Board(tmp_path / "board", 2, 3, create=True)
    assert board.best() is None
    board.post(0, 7.0, np.array([1, 2, 3]))
    other = Board(tmp_path / "board", 2, 3)
    other.post(1, 5.0, np.array([3, 2, 1]))
    other.post_bound(1, 4.0)
    cost, choice = board.best()
    assert (cost, choice.tolist(), board.best_bound()) == (5.0, [3, 2, 1], 4.0)
    other.table[1, 0] += 1  # as if it were being written
    assert board.best() is None


@pytest.mark.slow
def test_two_workers_search_together(problem, monkeypatch):
    monkeypatch.setattr(giant, "_closed", lambda *_: False)
    solution = solve(problem, seconds=6, workers=2, tuning=SearchTuning(Tuning(giant_states=0)))
    assert price(problem, solution.choice).legal


@pytest.mark.parametrize(("states", "nodes", "is_closed"), [(0, 0, False), (10**6, 0, True), (0, 10**6, True)])
def test_what_has_few_states_or_few_nodes_is_closed(monkeypatch, problem, states, nodes, is_closed):
    searched = []
    monkeypatch.setattr(giant, "_search", lambda run, *_: searched.append(run))
    solve(problem, seconds=30, workers=1, tuning=SearchTuning(Tuning(giant_states=states, few_nodes=nodes)), gap=0.9)
    assert len(searched) == (0 if is_closed else 1)


def test_a_number_of_workers_below_one_is_refused():
    with pytest.raises(ProblemError, match="workers is 0"):
        solve(ChoiceProblem(costs=[[1.0]]), workers=0)
