"""Tree moves: exact where the problem is a tree, always legal, never dearer, and repeatable."""

import itertools

import numpy as np
import pytest

from meshwright.contest.tree_moves import Trees
from meshwright.solver import ChoiceProblem, price
from meshwright.solver.model.half_edges import link
from meshwright.solver.model.model import State, from_problem
from tests.solver.problems import brute_model, random_problem


def _moved(model, choice, seed=0, rounds=1):
    state = State.of(model, np.array(choice, dtype=np.int64))
    roots = np.tile(np.arange(model.num_nodes), rounds)
    Trees(model, link(model)).move(state.choice, state.load, model.cost, roots, seed)
    return state


def _legal_choice(problem):
    for choice in itertools.product(*(range(k) for k in np.diff(problem.first))):
        if price(problem, choice).legal:
            return choice
    return None


def _tree_problem(seed, num_nodes=7):
    """A random tree with impossible pairs, in which the first states go together."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 5, num_nodes)
    edges = []
    for v in range(1, num_nodes):
        u = int(random.integers(v))
        matrix = random.integers(0, 20, (sizes[u], sizes[v])).astype(float)
        matrix[random.random(matrix.shape) < 0.2] = np.inf
        matrix[0, 0] = 19.0
        edges.append((u, v, matrix))
    costs = [random.integers(0, 20, k).astype(float) for k in sizes]
    nothing = [np.zeros(k) for k in sizes]
    return ChoiceProblem(costs=costs, usages=nothing, intervals=[(0, 1)] * num_nodes, edges=edges, limit=None)


@pytest.mark.parametrize("seed", range(20))
def test_one_move_solves_a_tree(seed):
    model = from_problem(_tree_problem(seed))
    state = State.of(model, np.zeros(model.num_nodes))
    Trees(model, link(model)).move(state.choice, state.load, model.cost, np.array([seed % model.num_nodes]), seed)
    assert State.of(model, state.choice).cost == brute_model(model)[0]


def test_moves_are_legal_never_dearer_and_keep_the_load():
    for seed in range(40):
        problem = random_problem(seed, max_nodes=6)
        begin = _legal_choice(problem)
        if begin is None:  # nothing fits: no moves to make
            continue
        model = from_problem(problem)
        state = _moved(model, begin, seed, rounds=5)
        assert state.load.tolist() == pytest.approx(State.of(model, state.choice).load.tolist())
        checked = price(problem, state.choice)
        assert checked.legal
        assert brute_model(model)[0] <= checked.cost <= price(problem, begin).cost


def test_where_the_best_state_does_not_fit_one_between_is_taken():
    problem = ChoiceProblem(costs=[[10, 4, 0]], usages=[[0, 3, 9]], intervals=[(0, 1)], limit=5)
    assert _moved(from_problem(problem), [0]).choice.tolist() == [1]


def test_the_same_seed_gives_the_same_moves():
    model = from_problem(_tree_problem(3, num_nodes=60))
    first, second = (_moved(model, np.zeros(60), 5) for _ in range(2))
    assert first.choice.any()
    assert first.choice.tolist() == second.choice.tolist()
