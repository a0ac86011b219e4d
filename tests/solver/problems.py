"""Random small choice problems and a brute-force oracle for the solver's tests."""

import itertools

import numpy as np

from meshwright.solver.problem.check import price
from meshwright.solver.problem.problem import ChoiceProblem


def random_problem(seed: int, max_nodes: int = 7, max_states: int = 4, memory: bool = True, whole: bool = True):
    """A random problem with parallel edges, impossible pairs, ties, several rows per node and a limit that may bind."""
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, max_nodes + 1))
    sizes = rng.integers(1, max_states + 1, size=num_nodes)
    largest = int(rng.choice([2, 10, 1000]))

    def draw(*shape):
        values = rng.integers(0, largest, size=shape).astype(float)
        return values if whole else values + rng.random(shape)

    costs = [draw(k) for k in sizes]
    edges = []
    for _ in range(int(rng.integers(0, 2 * num_nodes))):
        u, v = rng.integers(0, num_nodes, size=2)
        if u != v:
            edges.append((int(u), int(v), _matrix(rng, draw, sizes[u], sizes[v])))
    rows = []
    for node in range(num_nodes):
        for _ in range(int(rng.integers(0, 3))):
            start = int(rng.integers(0, 6))
            rows.append((node, start, start + int(rng.integers(0, 5)), rng.integers(0, 6, size=sizes[node])))
    most = sum(int(row[3].max()) for row in rows)
    limit = float(rng.integers(0, most + 2)) if memory else None
    return ChoiceProblem.from_rows(costs, edges, rows, limit)


def _matrix(rng, draw, rows, columns):
    matrix = draw(rows, columns)
    kind = rng.integers(0, 4)
    if kind == 0:  # impossible pairs
        matrix[rng.random(matrix.shape) < 0.4] = 1e18
    elif kind == 1:  # a function: every state of the first node allows one of the second
        allowed = rng.integers(0, columns, size=rows)
        matrix[np.arange(columns)[None, :] != allowed[:, None]] = np.inf
    return matrix


def brute_force(problem: ChoiceProblem):
    """The least cost over all legal choices; inf where there is none."""
    best = np.inf
    for choice in itertools.product(*(range(k) for k in np.diff(problem.first))):
        found = price(problem, choice)
        if found.legal:
            best = min(best, found.cost)
    return best


def brute_model(model):
    """The least cost over all choices of an inner model that fit its caps, and that choice (None if there is none)."""
    sizes = np.diff(model.off)
    best, best_choice = np.inf, None
    for choice in itertools.product(*(range(k) for k in sizes)):
        picked = np.array(choice, dtype=np.int64)
        cost = float(model.cost[model.off[:-1] + picked].sum())
        for u, v, begin in zip(model.eu, model.ev, model.eoff, strict=True):
            cost += model.mat[begin + picked[u] * sizes[v] + picked[v]]
        load = np.zeros(len(model.cap))
        for r in range(len(model.rnode)):
            load[model.rstart[r] : model.rend[r]] += model.usage[model.roff[r] + picked[model.rnode[r]]]
        if cost < best and bool((load <= model.cap + 1e-9).all()):
            best, best_choice = cost, picked
    return best, best_choice
