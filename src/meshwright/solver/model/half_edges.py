"""Half-edges of a model in compressed form, with every matrix in both orientations, for the message passing."""

from typing import NamedTuple

import numpy as np

from meshwright.jit import inline, kernel
from meshwright.solver.model import numpy_kernels
from meshwright.solver.model.model import Model, read_only


class Links(NamedTuple):
    """Half-edges of u are hoff[u]:hoff[u+1], those to earlier nodes first; split[u] is the first to a later one.

    States that an edge does not tell apart (equal rows or columns of its matrix) form one kind: costs of resharding
    depend on few of a strategy's properties, so the matrices of kinds are several times smaller.
    """

    hoff: np.ndarray  # int64 [nodes + 1]
    split: np.ndarray  # int64 [nodes]
    far: np.ndarray  # int32 [half-edges], the other node
    back: np.ndarray  # int64 [half-edges], the half-edge that leads here from there
    msg: np.ndarray  # int64 [half-edges], where this half-edge's message (one number per own state) begins
    of_edge: np.ndarray  # int64 [2, edges], where an edge's messages to its first and second node begin
    plane: np.ndarray  # int64 [half-edges], where the matrix with own states as rows begins in mats
    mats: np.ndarray  # float64, each matrix and its transpose
    kind: np.ndarray  # int64 [half-edges], where the kinds of the own states begin in kinds
    kinds: np.ndarray  # int32
    num_kinds: np.ndarray  # int64 [half-edges], of the own states
    lean: (
        np.ndarray
    )  # int64 [half-edges], where the matrix with the far kinds as rows, the own as columns begins in leans
    leans: np.ndarray  # float64
    num_messages: int


class HalfEdges(NamedTuple):
    """Both directions of all edges by the numbers of their nodes.

    Attributes:
        order: Which they are: edges from their first nodes, then from their second.
        own, far: Their nodes.
        hoff: Those of node u are hoff[u]:hoff[u+1].
    """

    order: np.ndarray
    own: np.ndarray
    far: np.ndarray
    hoff: np.ndarray


def half_edges(model: Model) -> HalfEdges:
    """Orders the half-edges of a model."""
    own, far = np.concatenate([model.eu, model.ev]), np.concatenate([model.ev, model.eu])
    order = np.lexsort((far, own))
    own = own[order]
    return HalfEdges(order, own, far[order], np.searchsorted(own, np.arange(model.num_nodes + 1)).astype(np.int64))


def link(model: Model) -> Links:
    """Links the nodes of a model, with what its edges cost."""
    num_nodes, num_edges = model.num_nodes, len(model.eu)
    sizes = np.diff(model.off)
    order, own, far, hoff = half_edges(model)
    place = np.empty(2 * num_edges, dtype=np.int64)
    place[order] = np.arange(2 * num_edges)
    twin = np.concatenate([np.arange(num_edges, 2 * num_edges), np.arange(num_edges)])
    distinct, first, index = np.unique(model.eoff, return_index=True, return_inverse=True)
    rows, columns = sizes[model.eu[first]], sizes[model.ev[first]]
    cells = np.concatenate([[0], np.cumsum(2 * rows * columns)]).astype(np.int64)
    states = np.concatenate([[0], np.cumsum(rows + columns)]).astype(np.int64)
    mats, leans = np.empty(cells[-1]), np.empty(cells[-1])
    kinds, num_kinds = np.empty(states[-1], dtype=np.int32), np.empty((2, len(distinct)), dtype=np.int64)
    write_both(read_only(model.mat), distinct, rows, columns, cells, mats)
    find_kinds(mats, mats.view(np.uint64), rows, columns, cells, states, kinds, num_kinds, leans)
    begin, turned = cells[:-1][index], (cells[:-1] + rows * columns)[index]
    earlier = np.bincount(own[far < own], minlength=num_nodes) if num_edges else np.zeros(num_nodes, dtype=np.int64)
    lengths = sizes[own]
    msg = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Links(
        hoff=hoff,
        split=hoff[:-1] + earlier,
        far=far.astype(np.int32),
        back=place[twin[order]],
        msg=msg[:-1],
        of_edge=msg[:-1][place].reshape(2, num_edges),
        plane=np.concatenate([begin, turned])[order],
        mats=mats,
        kind=np.concatenate([states[:-1][index], (states[:-1] + rows)[index]])[order],
        kinds=kinds,
        num_kinds=np.concatenate([num_kinds[0, index], num_kinds[1, index]])[order],
        lean=np.concatenate([turned, begin])[order],
        leans=leans,
        num_messages=int(msg[-1]),
    )


@kernel(plain=numpy_kernels.write_both)
def write_both(mat, source, rows, columns, begin, mats):
    for i in range(len(source)):
        r, c = rows[i], columns[i]
        for s in range(r):
            for t in range(c):
                value = mat[source[i] + s * c + t]
                mats[begin[i] + s * c + t] = value
                mats[begin[i] + r * c + t * r + s] = value


@kernel
def find_kinds(mats, bits, rows, columns, cells, states, kinds, num_kinds, leans):
    """Numbers the kinds of rows and of columns of every matrix and writes the matrix of kinds in both orientations."""
    for i in range(len(rows)):
        r, c, begin = rows[i], columns[i], cells[i]
        row_kinds, column_kinds = kinds[states[i] : states[i] + r], kinds[states[i] + r : states[i + 1]]
        first_row, num_rows = _number(bits, begin, r, c, row_kinds)
        first_column, num_columns = _number(bits, begin + r * c, c, r, column_kinds)
        num_kinds[0, i], num_kinds[1, i] = num_rows, num_columns
        for a in range(num_rows):
            for b in range(num_columns):
                value = mats[begin + first_row[a] * c + first_column[b]]
                leans[begin + a * num_columns + b] = value
                leans[begin + r * c + b * num_rows + a] = value


@inline(plain=numpy_kernels.number)
def _number(bits, begin, rows, columns, kinds):
    """Numbers equal rows alike; returns the first row of every number."""
    hashes, first = np.empty(rows, dtype=np.uint64), np.empty(rows, dtype=np.int64)
    count = 0
    for a in range(rows):
        mixed = np.uint64(0)
        for b in range(columns):
            mixed = (mixed ^ bits[begin + a * columns + b]) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        kinds[a] = -1
        for k in range(count):
            if hashes[k] != mixed:
                continue
            one, other = begin + first[k] * columns, begin + a * columns
            if (bits[one : one + columns] == bits[other : other + columns]).all():
                kinds[a] = k
                break
        if kinds[a] < 0:
            kinds[a], hashes[count], first[count] = count, mixed, a
            count += 1
    return first, count
