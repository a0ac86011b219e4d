"""The undo stack: what to do with each removed node once its neighbours' strategies are known."""

import numpy as np

from meshwright.jit import inline, kernel
from meshwright.solver.reductions.mutable_graph import RECORDS, UNDOS

_FIXED, _ONE, _PAIR = 0, 1, 2


@inline
def _open(work):
    work.record[work.used[RECORDS]] = work.used[UNDOS]
    work.used[RECORDS] += 1
    return work.used[UNDOS]


@inline
def record_fixed(work, u, label):
    """u takes one state, whatever the others do. Needs no room check: three numbers per node are always reserved."""
    at = _open(work)
    work.undo[at], work.undo[at + 1], work.undo[at + 2] = _FIXED, u, label
    work.used[UNDOS] = at + 3


@inline
def record_one(work, v, u):
    """v follows u by the map in work.buffer."""
    at = _open(work)
    k = work.k[u]
    work.undo[at], work.undo[at + 1], work.undo[at + 2], work.undo[at + 3] = _ONE, v, u, k
    for s in range(k):
        work.undo[at + 4 + s] = work.label[work.off[u] + s]
        work.undo[at + 4 + k + s] = work.label[work.off[v] + np.int64(work.buffer[s])]
    work.used[UNDOS] = at + 4 + 2 * k


@inline
def record_pair(work, u, v, w):
    """u follows v and w by a table that the caller writes; returns where it begins."""
    at = _open(work)
    kv, kw = work.k[v], work.k[w]
    work.undo[at], work.undo[at + 1], work.undo[at + 2], work.undo[at + 3] = _PAIR, u, v, w
    work.undo[at + 4], work.undo[at + 5] = kv, kw
    for s in range(kv):
        work.undo[at + 6 + s] = work.label[work.off[v] + s]
    for s in range(kw):
        work.undo[at + 6 + kv + s] = work.label[work.off[w] + s]
    table = at + 6 + kv + kw
    work.used[UNDOS] = table + np.int64(kv) * kw
    return table


@kernel
def replay(undo, record, num_records, labels):
    """Fills in the labels of all removed nodes, last removed first."""
    for i in range(num_records - 1, -1, -1):
        at = record[i]
        kind, u = undo[at], undo[at + 1]
        if kind == _FIXED:
            labels[u] = undo[at + 2]
        elif kind == _ONE:
            k = undo[at + 3]
            s = _place(undo, at + 4, k, labels[undo[at + 2]])
            labels[u] = undo[at + 4 + k + s]
        else:
            kv, kw = undo[at + 4], undo[at + 5]
            s = _place(undo, at + 6, kv, labels[undo[at + 2]])
            t = _place(undo, at + 6 + kv, kw, labels[undo[at + 3]])
            labels[u] = undo[at + 6 + kv + kw + np.int64(s) * kw + t]


@inline
def _place(undo, begin, size, label):
    for s in range(size):
        if undo[begin + s] == label:
            return s
    return 0
