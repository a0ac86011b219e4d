"""What the reductions spend their time on, in NumPy: run where kernels are interpreted, with the same results.

Each function does what the one of the same name does in `edge_matrices.py` or `rules.py`, and says nothing of its own
about why. What is only scratch afterwards is not written.
"""

import numpy as np


def pull_rows(work, u, begin, ku, kv):
    block = work.mat[begin : begin + ku * kv].reshape(ku, kv)
    least = block.min(axis=1, initial=np.inf)
    possible = block[block < np.inf]
    dead = least == np.inf
    work.cost[work.off[u] : work.off[u] + ku] += least
    block -= np.where(dead, 0.0, least)[:, None]
    return np.abs(possible, out=possible).max(initial=0.0), dead.any()


def pull_columns(work, v, begin, ku, kv):
    block = work.mat[begin : begin + ku * kv].reshape(ku, kv)
    least = block.min(axis=0, initial=np.inf)
    dead = least == np.inf
    work.cost[work.off[v] : work.off[v] + kv] += least
    block -= np.where(dead, 0.0, least)
    return dead.any()


def round_down(mat, begin, size, most):
    block = mat[begin : begin + size]
    small = block <= most
    block[small] = 0.0
    return small.all()


def mark_dominated(work, u, k):
    cost = work.cost[work.off[u] : work.off[u] + k]
    rows, matrices = _rows(work, u, k), _matrices(work, u)
    keep = work.keep[:k]
    keep[:] = 1
    for a in range(k):
        slack = cost[a] - cost
        better = (keep == 1) & (slack >= 0)
        better[a] = False
        for usage in rows:
            better &= usage <= usage[a]
        states = np.flatnonzero(better)
        for matrix in matrices:
            if len(states) == 0:
                break
            # Where a itself is impossible, less infinity or NaN is left, which fmax passes over.
            slack[states] -= np.fmax.reduce(matrix[states] - matrix[a], axis=1, initial=0.0)
            states = states[slack[states] >= 0.0]
        keep[a] = len(states) == 0
    return not keep.all()


def minimise_over(work, u, h, g, begin, table):
    near, far = _matrix(work, h), _matrix(work, g)
    labels = work.label[work.off[u] : work.off[u] + len(near)]
    base = work.cost[work.off[u] : work.off[u] + len(near), None] + near
    size = near.shape[1] * far.shape[1]
    least = np.full((near.shape[1], far.shape[1]), np.inf)
    best = np.full(least.shape, labels[0])
    for s in range(len(near)):
        here = base[s][:, None] + far[s]
        better = here < least
        least[better] = here[better]
        best[better] = labels[s]
    work.mat[begin : begin + size] = least.ravel()
    work.undo[table : table + size] = best.ravel()


def _matrix(work, h):
    """The matrix of a half-edge, its own node's states as rows."""
    e = h >> 1
    ku, kv = int(work.k[work.eu[e]]), int(work.k[work.ev[e]])
    matrix = work.mat[work.eoff[e] : work.eoff[e] + ku * kv].reshape(ku, kv)
    return matrix if h & 1 == 0 else matrix.T


def _matrices(work, u):
    found, h = [], work.head[u]
    while h >= 0:
        found.append(_matrix(work, h))
        h = work.hnext[h]
    return found


def _rows(work, u, k):
    found, r = [], work.rhead[u]
    while r >= 0:
        found.append(work.usage[work.roff[r] : work.roff[r] + k])
        r = work.rnext[r]
    return found
