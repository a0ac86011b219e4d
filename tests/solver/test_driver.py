"""solve() against brute force and HiGHS on random small problems."""

import numpy as np
import pytest

from meshwright.errors import ProblemError
from meshwright.solver import ChoiceProblem, Status, price, solve
from meshwright.solver import run as run_module
from meshwright.solver.exact import resumable
from meshwright.solver.run import Run
from meshwright.solver.tuning import Tuning
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


@pytest.mark.parametrize("going_on", [0.0, 1e6])
def test_a_solve_up_to_a_gap_goes_on_for_a_while_and_stops_with_a_true_bound(going_on):
    tuning, stopped = Tuning(extra_time=going_on), 0
    for seed in (0, 1, 3, 4, 5):
        problem = example(True, num_nodes=14, num_states=5, seed=seed)
        proven, near = solve(problem, seconds=20), solve(problem, seconds=20, gap=0.2, tuning=tuning)
        assert proven.status == Status.OPTIMAL
        assert near.gap <= 0.2
        assert price(problem, near.choice).legal
        assert near.lower_bound <= proven.cost <= near.cost
        stopped += near.status == Status.FEASIBLE
    assert (stopped > 0) == (going_on == 0.0)  # with all the time in the world, everything is proven


@pytest.mark.parametrize("bound", [8.0, 8.3])
def test_among_whole_numbers_a_bound_one_below_proves_nothing(bound):
    """A choice that costs one less may be there: bounds of a search are good to half a unit."""
    problem = ChoiceProblem.from_rows([np.array([8.0, 9.0])], [], [], None)
    run = Run(problem, initial=[1])
    run.raise_bound(bound)
    found = run.finish()
    assert (found.status, found.cost, found.lower_bound) == (Status.FEASIBLE, 9.0, 8.0)
    run.raise_bound(8.5)
    assert run.finish().status == Status.OPTIMAL


def test_a_solve_that_was_left_goes_on_from_there_and_proves_the_same(monkeypatch):
    simplified, begun = [], []
    simplify, begin = run_module.simplify, resumable.ResumableSolve._begin
    monkeypatch.setattr(run_module, "simplify", lambda *args: simplified.append(args) or simplify(*args))
    monkeypatch.setattr(resumable.ResumableSolve, "_begin", lambda *args: begun.append(args) or begin(*args))
    left = 0
    for seed in (0, 1, 3, 4, 5):
        problem = example(True, num_nodes=14, num_states=5, seed=seed)
        proven = solve(problem, seconds=20)
        run = Run(problem, tuning=Tuning(extra_time=0.0))
        for calls in (simplified, begun):
            calls.clear()
        first, told = run.solve(20, gap=0.2), run.history
        second = run.solve(20)
        assert len(simplified) == 1 and len(begun) <= 1
        assert first.lower_bound <= second.lower_bound == second.cost <= first.cost
        assert second.cost == pytest.approx(proven.cost)
        assert second.status == Status.OPTIMAL and price(problem, second.choice).legal
        if first.status == Status.FEASIBLE:
            left += 1
            assert all(progress.lower_bound >= first.lower_bound for progress in second.history)
            assert run.history is not told and first.history == tuple(told)
    assert left > 1


def test_a_solve_that_begins_again_keeps_its_choice(monkeypatch):
    known = []
    begin = resumable.ResumableSolve.__init__

    def noted(self, search, model, cutoff, **options):
        known.append(cutoff)
        begin(self, search, model, cutoff, **options)

    monkeypatch.setattr(resumable.ResumableSolve, "__init__", noted)
    problem = example(True, num_nodes=14, num_states=5, seed=0)
    run = Run(problem, tuning=Tuning(extra_time=0.0))
    first = run.solve(20, gap=0.2)
    run.begin_again()
    second = run.solve(20)
    assert len(known) == 2 and known[0] == np.inf and known[1] < np.inf
    assert second.status == Status.OPTIMAL and second.cost <= first.cost


def test_a_solve_tells_what_memory_is_worth():
    """Memory at these prices, less what the limit is worth, bounds the cost, and better than no price does."""
    told = 0
    for seed in (0, 1, 3, 4, 5):
        problem = example(True, num_nodes=14, num_states=5, seed=seed)
        problem.row_start, problem.row_end = (7 + 3 * at for at in (problem.row_start, problem.row_end))
        run = Run(problem)
        assert run.prices == {}
        best = run.solve(20)
        free = problem.with_limit(np.inf)
        unpriced, free.cost = solve(free).cost, problem.cost.copy()
        for time, worth in run.prices.items():
            told += 1
            for row in np.flatnonzero((problem.row_start <= time) & (time < problem.row_end)):
                first, taken = problem.first[problem.row_node[row]], problem.usage[problem.row_first[row] :][:5]
                free.cost[first : first + 5] += worth * taken
        bound = solve(free).cost - problem.limit * sum(run.prices.values())
        assert bound <= best.cost * (1 + 1e-9)
        assert bound > unpriced if run.prices else best.cost == unpriced
    assert told > 3


def test_a_solve_with_a_goal_ends_once_nothing_below_it_is_left():
    left = 0
    for seed in (0, 1, 3, 4, 5):
        problem = example(True, num_nodes=14, num_states=5, seed=seed)
        proven = solve(problem, seconds=20)
        for part in (0.8, 0.95, 1.0):
            found = solve(problem, seconds=20, goal=part * proven.cost)
            assert part * proven.cost <= found.lower_bound <= proven.cost
            assert found.choice is None or price(problem, found.choice).legal
            left += found.status != Status.OPTIMAL
        assert solve(problem, seconds=20, goal=1.01 * proven.cost).cost == proven.cost
    assert left


@pytest.mark.parametrize("num_nodes", [6, 14, 30])
def test_moments_that_no_choice_fits_together_are_recognised(num_nodes):
    """Each moment by itself would fit, but what one saves the other takes: together they need 10 a node."""
    rng = np.random.default_rng(num_nodes)
    usages = np.array([3.0, 5.0, 7.0])
    rows = [(i, at, at + 1, usages[:: 1 - 2 * at]) for i in range(num_nodes) for at in (0, 1)]
    edges = [(i, i + 1, rng.random((3, 3))) for i in range(num_nodes - 1)]
    costs = 1 + rng.random((num_nodes, 3))
    short, enough = (ChoiceProblem.from_rows(costs, edges, rows, limit) for limit in (5 * num_nodes - 1, 5 * num_nodes))
    found = solve(short, seconds=600)
    assert found.status == Status.INFEASIBLE
    assert short.limit < found.least_limit <= enough.limit
    assert solve(enough, seconds=600).status == Status.OPTIMAL


def test_bad_arguments_are_named():
    problem = ChoiceProblem(costs=[[1.0]])
    with pytest.raises(ProblemError, match="seconds is 0"):
        solve(problem, seconds=0)
    with pytest.raises(ProblemError, match="gap is 2"):
        solve(problem, gap=2)
    with pytest.raises(ProblemError, match="goal is nan"):
        solve(problem, goal=float("nan"))
    with pytest.raises(ProblemError, match="problem is list"):
        solve([1])


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5])  # 2 fits nowhere
def test_costs_below_zero_are_proven_like_others(seed):
    """What a cost is moved by moves every choice alike, also where a goal or the dearest choice ends a search."""
    problem = example(True, num_nodes=14, num_states=5, seed=seed)
    moved = problem.with_limit(problem.limit)
    moved.cost = problem.cost - 1000.0
    one, other = solve(problem, seconds=20), solve(moved, seconds=20)
    assert one.status == other.status == Status.OPTIMAL
    assert other.cost == pytest.approx(one.cost - 1000.0 * problem.num_nodes)
