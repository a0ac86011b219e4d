"""ResumableSolve small models: against brute force, and against HiGHS where brute force cannot go."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from meshwright.solver import ChoiceProblem, Status, price, solve
from meshwright.solver.bounds.dual import Dual, ascend_prices
from meshwright.solver.bounds.memory_prices import climb_prices
from meshwright.solver.deadline import Deadline
from meshwright.solver.exact import branch_and_bound
from meshwright.solver.exact.branch_and_bound import BranchAndBound, Options
from meshwright.solver.exact.branching import split
from meshwright.solver.exact.bucket_elimination import eliminate
from meshwright.solver.exact.resumable import ResumableSolve, close
from meshwright.solver.exact.subproblem import Closed, decoded_found, repaired_found
from meshwright.solver.model.half_edges import link
from meshwright.solver.model.model import State, cost_of, from_problem
from meshwright.solver.reductions.simplify import simplify
from meshwright.solver.tuning import Tuning
from meshwright.solver.warm import example
from tests.solver.highs_oracle import solve_mip
from tests.solver.layers import layered_problem

pytestmark = pytest.mark.slow


def _highs(problem):
    """The optimum by HiGHS on the unreduced model; inf where it proves that nothing fits."""
    found = solve_mip(from_problem(problem), 60)
    if found.choice is None:
        assert found.infeasible
        return np.inf
    return price(problem, found.choice).cost


@pytest.mark.sweep(6)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("memory", [False, True])
def test_highs_agrees_on_dense_problems(seed, memory):
    problem = example(memory, num_nodes=12, num_states=4, seed=seed)
    solution = solve(problem, seconds=60)
    best = _highs(problem)
    if np.isinf(best):
        assert solution.status == Status.INFEASIBLE
        return
    assert solution.status == Status.OPTIMAL
    assert price(problem, solution.choice).legal
    assert solution.cost == pytest.approx(best, rel=1e-6)
    assert solution.lower_bound <= best * (1 + 1e-6)


@pytest.mark.parametrize("limit_part", [None, 0.14, 0.08])  # HiGHS takes ten times as long for 0.1
def test_highs_agrees_on_layered_problems(limit_part):
    problem = layered_problem((8, 2), layers=1, limit_part=limit_part)
    solution = solve(problem, seconds=60)
    assert solution.status == Status.OPTIMAL
    assert price(problem, solution.choice).legal
    assert solution.cost == pytest.approx(_highs(problem), rel=1e-6)


def test_a_closing_goes_on_for_as_long_again_as_all_of_it_took(monkeypatch):
    model = simplify(from_problem(layered_problem((8, 2), layers=2, limit_part=0.1))).model
    closing, given = ResumableSolve(Options(1e-9), model), []

    def noted(search, dual, best, cutoff, enough):
        given.append(search.deadline.left)
        return replace(best, bound=0.99 * best.cost)

    monkeypatch.setattr(BranchAndBound, "close_gap", noted)
    closing.resume(gap=0.9)
    closing._seconds = 50.0
    closing.resume(gap=0.9)
    assert len(given) == 4 and given[0] == given[2] == np.inf
    assert given[1] < 40.0 and 50.0 <= given[3] < 90.0


@pytest.mark.parametrize("cut", [False, True])
def test_what_time_did_not_do_for_is_done_when_it_is_gone_on_with(monkeypatch, cut):
    model = simplify(from_problem(layered_problem((8, 2), layers=2, limit_part=0.1))).model
    best, look, looked = close(Options(1e-9), model), BranchAndBound._relaxation_below, []

    def noted(search, dual, goal, enough):
        looked.append(goal)
        found = look(search, dual, goal, enough)
        if len(looked) > 1:
            return found
        search.deadline = Deadline(-np.inf)  # time is up
        return Closed(None, np.inf, dual.bound) if cut else found

    monkeypatch.setattr(BranchAndBound, "_relaxation_below", noted)
    closing = ResumableSolve(Options(1e-9), model)
    found = closing.resume()
    assert len(looked) == 1 and found.bound < found.cost
    found = closing.resume()
    assert (len(looked) > 1) == cut
    assert found.bound == pytest.approx(found.cost) == pytest.approx(best.cost)


def test_sweeps_go_on_while_the_bound_rises(monkeypatch):
    def no_split(*_):
        raise AssertionError("sweeps alone leave few enough states")

    # What one end of a long grid wants tells only step by step on the other.
    length, width, num_states = 30, 5, 5
    rng = np.random.default_rng(0)
    costs = 0.1 * rng.random((length, width, num_states))
    costs[0, :, 1:] += 9.0
    costs[-1, :, :-1] += 9.0
    node = np.arange(length * width).reshape(length, width)
    pairs = [*zip(node[:-1].flat, node[1:].flat, strict=True), *zip(node[:, :-1].flat, node[:, 1:].flat, strict=True)]
    apart = np.abs(np.subtract.outer(np.arange(num_states), np.arange(num_states))).astype(float)
    problem = ChoiceProblem(costs=costs.reshape(-1, num_states), edges=[(int(u), int(v), apart) for u, v in pairs])
    monkeypatch.setattr(branch_and_bound, "split", no_split)
    solution = solve(problem, seconds=60)
    assert solution.status == Status.OPTIMAL
    assert solution.cost == pytest.approx(_highs(problem), rel=1e-6)


@pytest.mark.parametrize("limit_part", [0.1, 0.2, 0.3])
def test_a_choice_is_found_close_to_the_bound_even_where_a_gap_would_do(limit_part):
    model = simplify(from_problem(layered_problem((8, 2), layers=1, limit_part=limit_part))).model
    best = close(Options(1e-9), model)
    dual = Dual(model)
    dual.converge(30)
    climb_prices(dual, 0.03 * abs(dual.bound), 60)
    search = BranchAndBound(Options(1e-9)).copy(slack=abs(best.cost))
    found = search._relaxation_below(dual, best.cost * (1 + 1e-3), np.inf)
    assert found.choice is not None
    assert found.cost <= best.cost * (1 + 1e-9)


def test_a_problem_of_many_states_and_nodes_is_closed_as_well():
    tuning = Tuning(giant_states=0, few_nodes=0)
    solution = solve(layered_problem((8, 2), layers=1, limit_part=0.2), seconds=60, tuning=tuning)
    assert solution.status == Status.OPTIMAL


@pytest.mark.parametrize("seed", range(6))
def test_splits_alone_prove_what_elimination_would(seed):
    problem = example(True, num_nodes=12, num_states=4, seed=seed)
    solution = solve(problem, seconds=60, tuning=Tuning(rows=0.0))
    best = _highs(problem)
    assert (solution.status == Status.INFEASIBLE) == np.isinf(best)
    if np.isfinite(best):
        assert solution.status == Status.OPTIMAL
        assert price(problem, solution.choice).cost == pytest.approx(best, rel=1e-6)


def test_a_cutoff_below_the_optimum_is_proven_empty():
    problem = example(True, seed=3)
    simple = simplify(from_problem(problem))
    best = solve(problem, seconds=60).cost - simple.offset
    closed = close(Options(0.5), simple.model, best)
    assert closed.choice is None
    assert closed.bound >= best - 0.5


def test_bounds_never_pass_the_optimum_and_the_search_finds_it():
    for seed in range(6):
        simple = simplify(from_problem(example(True, num_nodes=10, seed=seed)))
        if simple.infeasible or simple.model.num_nodes == 0:
            continue
        best = solve_mip(simple.model, 60)
        dual = Dual(simple.model)
        dual.converge(30)
        ascend_prices(dual, np.inf, 50)
        cost = cost_of(simple.model, best.choice)
        assert dual.bound <= cost + 1e-6
        found = eliminate([dual], cost + 0.5, 1e5)
        assert found.reached == cost + 0.5
        assert cost_of(simple.model, found.choice) == pytest.approx(cost)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("few", [0, 100])
def test_splitting_proves_what_one_search_would(seed, memory, few):
    simple = simplify(from_problem(example(memory, num_nodes=14, num_states=4, seed=seed)))
    whole = close(Options(1e-9), simple.model)
    split = close(Options(1e-9, Tuning(rows=few)), simple.model)
    assert split.cost == pytest.approx(whole.cost, rel=1e-9)
    assert split.bound == pytest.approx(split.cost, rel=1e-9)


class _Clock:
    """Time that passes by one with every look."""

    now = 0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.mark.parametrize("few", [0, 1, 2e5])
@pytest.mark.parametrize("seed", range(3))
def test_whenever_it_is_stopped_bounds_hold_and_choices_fit(few, seed):
    model = from_problem(example(True, num_nodes=14, num_states=4, seed=seed))
    best = close(Options(1e-9), model).cost
    closed = 0
    for deadline in (*range(1, 40, 3), *range(40, 400, 40), 4000):
        options = Options(1e-9, Tuning(rows=few))
        found = close(options, model, deadline=Deadline(deadline, _Clock()))
        assert found.bound <= best + 1e-9
        assert found.cost >= best - 1e-9
        assert found.choice is None or State.of(model, found.choice).fits(model)
        closed += found.bound >= found.cost - 1e-9
    assert closed


def test_past_the_deadline_no_effort_is_left():
    dual = Dual(from_problem(example(True, num_nodes=10)))
    dual.converge(5)
    look = BranchAndBound(Options(1e-9), Deadline.after(-1.0))._long_elimination(10.0)
    assert look([dual], 1e9).reached < 1e9


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("memory", [False, True])
def test_parts_hold_every_choice_below_the_goal(seed, memory):
    model = from_problem(example(memory, num_nodes=6, num_states=4, seed=seed))
    dual = Dual(model)
    dual.converge(10)
    if memory:
        ascend_prices(dual, dual.bound * 1.1, 20)
    node = np.repeat(np.arange(model.num_nodes), np.diff(model.off))
    states = [State.of(model, np.array(choice)) for choice in product(*map(range, np.diff(model.off)))]
    costs = sorted(state.cost for state in states if state.fits(model))
    for goal in (dual.bound * 1.02, dual.bound * 1.2, costs[0] - 1e-6, costs[0] * 1.01):
        parts, bounds, worth = split(dual, goal)
        for state in states:
            if state.fits(model) and state.cost < goal:
                inside = [part[model.off[:-1] + state.choice].all() for part in parts]
                assert any(inside)
                assert all(bound <= state.cost + 1e-9 for bound, here in zip(bounds, inside, strict=True) if here)
        if len(parts) == 2:
            one, other = parts
            here = node == node[~one | ~other][0]
            assert one[~here].all() and other[~here].all() and worth < 1
            assert (one[here] ^ other[here]).all() and one[here].any() and other[here].any()
        dual.restore()


def test_what_no_half_can_hold_is_ruled_out():
    model = from_problem(example(memory=False, num_nodes=6, num_states=4, seed=2))
    dual = Dual(model)
    dual.converge(50)
    best = close(Options(1e-9), model)
    parts = split(dual, best.cost + 1e-6).parts
    assert len(parts) == 1 and parts[0][model.off[:-1] + best.choice].all() and not parts[0].all()


def test_kinds_stand_for_the_states_that_an_edge_does_not_tell_apart():
    matrix = np.array([[1.0, 2.0, 1.0], [3.0, np.inf, 3.0], [1.0, 2.0, 1.0], [1.0, 2.0, 5.0]])
    links = link(from_problem(ChoiceProblem(costs=[[0] * 4, [0] * 3], edges=[(0, 1, matrix)])))
    assert links.num_kinds.tolist() == [3, 3]
    rows, columns = (links.kinds[links.kind[h] : links.kind[h] + size] for h, size in ((0, 4), (1, 3)))
    assert rows.tolist() == [0, 1, 0, 2] and columns.tolist() == [0, 1, 2]
    lean = links.leans[links.lean[1] : links.lean[1] + 9].reshape(3, 3)
    assert (lean[rows][:, columns] == matrix).all()


@pytest.mark.parametrize("limit_part", [0.3, 0.15])
def test_a_first_choice_fits_and_is_below_the_cutoff(limit_part):
    simple = simplify(from_problem(layered_problem((8, 2), layers=2, limit_part=limit_part)))
    dual = Dual(simple.model)
    dual.converge(20)
    climb_prices(dual, 0.1 * abs(dual.bound), 60)
    decoded = decoded_found(dual, np.inf)
    assert decoded.choice is None or State.of(simple.model, decoded.choice).fits(simple.model)
    found = repaired_found(dual, decoded)
    assert found.choice is not None
    assert State.of(simple.model, found.choice).fits(simple.model)
    assert found.bound - 1e-9 <= found.cost == pytest.approx(cost_of(simple.model, found.choice))
    assert repaired_found(dual, decoded_found(dual, found.cost), found.cost).choice is None


def test_the_best_mix_of_choices_at_a_few_prices_fits_and_is_nearly_optimal():
    for limit_part in (0.02, 0.03, 0.04, 0.06):
        problem = layered_problem((8, 8), limit_part=limit_part)
        simple = simplify(from_problem(problem))
        dual = Dual(simple.model)
        dual.converge(10)
        climb_prices(dual, 0.03 * abs(dual.bound), 60)
        start = Closed(None, np.inf, dual.bound)
        found = BranchAndBound(Options(1e-9)).mix_minima(dual, start, np.inf)
        optimum = solve(problem, seconds=60)
        assert optimum.status == Status.OPTIMAL and State.of(simple.model, found.choice).fits(simple.model)
        assert optimum.cost - 1e-9 <= price(problem, simple.expand(found.choice)).cost <= 1.01 * optimum.cost
        cutoff = optimum.cost - simple.offset  # nothing costs less, and what costs as much is of no use
        again = BranchAndBound(Options(1e-9)).mix_minima(dual, start, (1 - 1e-9) * cutoff)
        assert again.choice is None
