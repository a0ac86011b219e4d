"""Random small choice problems and a brute-force oracle for the solver's tests."""

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


def all_choices(first: np.ndarray) -> np.ndarray:
    """Every choice, one per row, given where the strategies of each node begin; the last node's changes fastest."""
    sizes = np.diff(first)
    return np.indices(sizes).reshape(len(sizes), -1).T if len(sizes) else np.zeros((1, 0), dtype=np.int64)


def brute_force(problem: ChoiceProblem):
    """The least cost over all legal choices; inf where there is none."""
    choices, sizes = all_choices(problem.first), np.diff(problem.first)
    costs = problem.cost[problem.first[:-1] + choices].sum(axis=1)
    for (u, v), which in zip(problem.edge_nodes, problem.edge_matrix, strict=True):
        costs += problem.matrix[problem.matrix_first[which] + choices[:, u] * sizes[v] + choices[:, v]]
    for time in np.unique(problem.row_start):
        live = np.flatnonzero((problem.row_start <= time) & (time < problem.row_end))
        used = problem.usage[problem.row_first[live] + choices[:, problem.row_node[live]]].sum(axis=1)
        costs[used > problem.limit * (1 + 1e-12)] = np.inf
    best = price(problem, choices[np.argmin(costs)])  # by the independent checker
    assert best.legal == (costs.min() < 1e17)
    return best.cost if best.legal else np.inf


def all_states(model) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every choice of an inner model, its cost, and the memory that is left of every cap."""
    choices, sizes = all_choices(model.off), np.diff(model.off)
    costs = model.cost[model.off[:-1] + choices].sum(axis=1)
    for u, v, begin in zip(model.eu, model.ev, model.eoff, strict=True):
        costs += model.mat[begin + choices[:, u] * sizes[v] + choices[:, v]]
    left = np.tile(np.asarray(model.cap, dtype=float), (len(choices), 1))
    for node, start, end, first in zip(model.rnode, model.rstart, model.rend, model.roff, strict=True):
        left[:, start:end] -= model.usage[first + choices[:, node]][:, None]
    return choices, costs, left


def brute_model(model):
    """The least cost over all choices of an inner model that fit its caps, and that choice (None if there is none)."""
    choices, costs, left = all_states(model)
    costs[(left < -1e-9).any(axis=1)] = np.inf
    best = int(np.argmin(costs))
    return (float(costs[best]), choices[best]) if np.isfinite(costs[best]) else (np.inf, None)
