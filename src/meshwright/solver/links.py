"""Half-edges of a model in compressed form, with every matrix in both orientations, for the message passing."""

from typing import NamedTuple

import numpy as np

from meshwright.solver.kernel import kernel
from meshwright.solver.model import Model


class Links(NamedTuple):
    """Half-edges of u are hoff[u]:hoff[u+1], those to earlier nodes first; split[u] is the first to a later one."""

    hoff: np.ndarray  # int64 [nodes + 1]
    split: np.ndarray  # int64 [nodes]
    far: np.ndarray  # int32 [half-edges], the other node
    back: np.ndarray  # int64 [half-edges], the half-edge that leads here from there
    msg: np.ndarray  # int64 [half-edges], where this half-edge's message (one number per own state) begins
    plane: np.ndarray  # int64 [half-edges], where the matrix with own states as rows begins in mats
    mats: np.ndarray  # float64, each matrix and its transpose
    num_messages: int


def link(model: Model) -> Links:
    """Orders the half-edges of a model by the numbers of their nodes."""
    num_nodes, num_edges = model.num_nodes, len(model.eu)
    sizes = np.diff(model.off)
    own = np.concatenate([model.eu, model.ev])
    far = np.concatenate([model.ev, model.eu])
    order = np.lexsort((far, own))
    place = np.empty(2 * num_edges, dtype=np.int64)
    place[order] = np.arange(2 * num_edges)
    twin = np.concatenate([np.arange(num_edges, 2 * num_edges), np.arange(num_edges)])
    mats, straight, turned = both_ways(model, sizes)
    plane = np.concatenate([straight, turned])[order]
    own, far = own[order], far[order]
    hoff = np.searchsorted(own, np.arange(num_nodes + 1)).astype(np.int64)
    earlier = np.bincount(own[far < own], minlength=num_nodes) if num_edges else np.zeros(num_nodes, dtype=np.int64)
    lengths = sizes[own]
    msg = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Links(
        hoff, hoff[:-1] + earlier, far.astype(np.int32), place[twin[order]], msg[:-1], plane, mats, int(msg[-1])
    )


def both_ways(model: Model, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A pool with every distinct matrix and its transpose, and where both begin for every edge."""
    distinct, first, index = np.unique(model.eoff, return_index=True, return_inverse=True)
    rows = sizes[model.eu[first]] if len(first) else np.zeros(0, dtype=np.int64)
    columns = sizes[model.ev[first]] if len(first) else np.zeros(0, dtype=np.int64)
    begin = np.concatenate([[0], np.cumsum(2 * rows * columns)]).astype(np.int64)
    mats = np.empty(begin[-1])
    write_both(model.mat, distinct, rows, columns, begin, mats)
    return mats, begin[:-1][index], (begin[:-1] + rows * columns)[index]


@kernel
def write_both(mat, source, rows, columns, begin, mats):
    for i in range(len(source)):
        r, c = rows[i], columns[i]
        for s in range(r):
            for t in range(c):
                value = mat[source[i] + s * c + t]
                mats[begin[i] + s * c + t] = value
                mats[begin[i] + r * c + t * r + s] = value
