"""A model as a mixed-integer programme for HiGHS: the independent oracle of the tests and benchmarks."""

from dataclasses import dataclass

import numpy as np

from meshwright.solver.model.model import Model


@dataclass(frozen=True, eq=False)
class MipResult:
    """HiGHS's answer: a choice (None if it found none), its bound, and whether it proved that nothing fits."""

    choice: np.ndarray | None
    bound: float
    infeasible: bool


def solve_mip(model: Model, seconds: float) -> MipResult:
    """Solves  min Σ cost·x + Σ E·y  with x one-hot per node, the pairs y summing to x both ways, memory ≤ cap.

    Args:
        model: What to solve; impossible pairs get no variable.
        seconds: Time limit; HiGHS may overrun it inside one linear programme.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix, vstack

    num_states = len(model.cost)
    pair_cost, pair_rows, num_pairs = _pairs(model)
    num_variables = num_states + num_pairs
    cost = np.concatenate([model.cost, pair_cost])
    scale = max(float(np.abs(cost).max(initial=0.0)), 1e-300)
    sizes = np.diff(model.off)
    one_hot = csr_matrix(
        (np.ones(num_states), (np.repeat(np.arange(len(sizes)), sizes), np.arange(num_states))),
        shape=(len(sizes), num_variables),
    )
    ties = csr_matrix((pair_rows[0], (pair_rows[1], pair_rows[2])), shape=(pair_rows[3], num_variables))
    equal = vstack([one_hot, ties]).tocsr()
    right = np.concatenate([np.ones(len(sizes)), np.zeros(pair_rows[3])])
    constraints = [LinearConstraint(equal, right, right)]
    if len(model.cap):
        constraints.append(_memory(model, num_variables))
    integrality = np.concatenate([np.ones(num_states), np.zeros(num_pairs)])
    options = {"time_limit": seconds, "mip_rel_gap": 1e-10}
    result = milp(cost / scale, integrality=integrality, bounds=Bounds(0, 1), constraints=constraints, options=options)
    bound = -np.inf if result.mip_dual_bound is None else float(result.mip_dual_bound) * scale
    if result.x is None:
        return MipResult(None, bound, result.status == 2)
    choice = np.array([np.argmax(result.x[a:b]) for a, b in zip(model.off[:-1], model.off[1:], strict=True)])
    return MipResult(choice.astype(np.int64), bound, False)


def _pairs(model: Model):
    """Variables of the possible pairs and the rows that tie their sums to the states: Σ_t y(s,t) = x(s), and turned."""
    sizes = np.diff(model.off)
    costs, values, rows, columns = [], [], [], []
    variable, row = len(model.cost), 0
    for e in range(len(model.eu)):
        u, v = model.eu[e], model.ev[e]
        matrix = model.mat[model.eoff[e] : model.eoff[e] + sizes[u] * sizes[v]].reshape(sizes[u], sizes[v])
        s, t = np.nonzero(np.isfinite(matrix))
        costs.append(matrix[s, t])
        ids = variable + np.arange(len(s))
        variable += len(s)
        ends = np.concatenate([np.arange(sizes[u]), np.arange(sizes[v])])
        values += [np.ones(2 * len(s)), np.full(len(ends), -1.0)]
        rows += [row + s, row + sizes[u] + t, row + np.arange(len(ends))]
        columns += [ids, ids, model.off[u] + np.arange(sizes[u]), model.off[v] + np.arange(sizes[v])]
        row += len(ends)
    if not costs:
        return np.zeros(0), (np.zeros(0), np.zeros(0, dtype=int), np.zeros(0, dtype=int), 0), 0
    flat = (np.concatenate(values), np.concatenate(rows), np.concatenate(columns), row)
    return np.concatenate(costs), flat, variable - len(model.cost)


def _memory(model: Model, num_variables: int):
    from scipy.optimize import LinearConstraint
    from scipy.sparse import csr_matrix

    sizes = np.diff(model.off)
    times, columns, values = [], [], []
    for r in range(len(model.rnode)):
        u = model.rnode[r]
        span = np.arange(model.rstart[r], model.rend[r])
        used = model.usage[model.roff[r] : model.roff[r] + sizes[u]]
        states = np.flatnonzero(used)
        times.append(np.repeat(span, len(states)))
        columns.append(np.tile(model.off[u] + states, len(span)))
        values.append(np.tile(used[states], len(span)))
    scale = np.maximum(model.cap, 1.0)
    where = np.concatenate(times)
    table = csr_matrix(
        (np.concatenate(values) / scale[where], (where, np.concatenate(columns))), (len(scale), num_variables)
    )
    return LinearConstraint(table, -np.inf, model.cap / scale)
