"""Buckets: the order in which nodes are eliminated, and the cheapest choice of a model whose memory does not matter.

Nodes are eliminated one by one in the order of fewest combinations of states with their open neighbours. The bucket of
a node is the node and its open neighbours; its table holds the least cost of all that was eliminated into it, for each
combination of the neighbours' states.
"""

import math
from typing import NamedTuple

import numpy as np

from meshwright.jit import inline, kernel, pause, place
from meshwright.solver.model.half_edges import Links


class Buckets(NamedTuple):
    """The order of elimination and where each bucket's table lies, for the states of a model that are alive."""

    order: np.ndarray  # int64 [nodes], the node of each bucket
    first: np.ndarray  # int64 [nodes + 1], where the open nodes around it begin in scope
    scope: np.ndarray  # int64
    table: (
        np.ndarray
    )  # int64 [nodes + 1], where its table begins: by the states of the scope, those of the last fastest
    parent: np.ndarray  # int64 [nodes], the bucket that its table is part of; -1 for none
    sizes: np.ndarray  # int64 [nodes], the number of states of each node that are alive
    state: np.ndarray  # int64 [states], which these are, from the first place of the node's on
    combinations: float  # of states in all buckets


def arrange(links: Links, off: np.ndarray, alive: np.ndarray, most: float, most_nodes: int = 4_000) -> Buckets:
    """The buckets of a model, as far as they have no more than so many combinations of states.

    Models of more nodes have none: the time to order them grows with their square.
    """
    if len(off) > most_nodes:
        none = np.zeros(0, dtype=np.int64)
        return Buckets(none, none, none, none, none, none, none, np.inf)
    return arranged(links, off, alive, most)


@kernel(pauses=True)
def arranged(links, off, alive, most):
    num_nodes = len(off) - 1
    count, state, weight = np.zeros(num_nodes, np.int64), np.zeros(len(alive), np.int64), np.empty(num_nodes)
    for u in range(num_nodes):
        for s in range(off[u + 1] - off[u]):
            if alive[off[u] + s]:
                state[off[u] + count[u]] = s
                count[u] += 1
        weight[u] = math.log(max(count[u], 1))
    order, step, parent = np.full(num_nodes, -1), np.empty(num_nodes, np.int64), np.full(num_nodes, -1)
    first, table = np.zeros(num_nodes + 1, np.int64), np.zeros(num_nodes + 1, np.int64)
    scope = np.empty(4 * len(links.far), np.int64)
    near, nfirst, nlast = _neighbours(links, num_nodes)
    end, size = len(near), np.empty(num_nodes)
    for u in range(num_nodes):
        size[u] = _size(u, weight, near, nfirst, nlast)
    total = 0.0
    for k in range(num_nodes):
        pause()
        u = int(np.argmin(size))
        total += math.exp(size[u])
        if total > most:
            break
        around = near[nfirst[u] : nlast[u]].copy()
        if first[k] + len(around) > len(scope):
            scope = np.concatenate((scope, np.empty(len(scope) + len(around), np.int64)))
        entries = 1
        for j in range(len(around)):
            scope[first[k] + j] = around[j]
            entries *= count[around[j]]
        order[k], step[u], first[k + 1], table[k + 1] = u, k, first[k] + len(around), table[k] + entries
        size[u] = np.inf
        near, end = _fill_in(near, end, nfirst, nlast, u, around)
        for v in around:
            size[v] = _size(v, weight, near, nfirst, nlast)
    if total <= most:
        for k in range(num_nodes):
            for j in range(first[k], first[k + 1]):
                if parent[k] < 0 or step[scope[j]] < parent[k]:
                    parent[k] = step[scope[j]]
    return Buckets(order, first, scope, table, parent, count, state, total)


@inline
def _neighbours(links, num_nodes):
    """Every node's neighbours in order, each once, in one list that grows as others come to share a table with it."""
    near = np.empty(len(links.far), np.int64)
    nfirst, nlast = np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int64)
    end = 0
    for u in range(num_nodes):
        nfirst[u] = end
        for h in range(links.hoff[u], links.hoff[u + 1]):
            if h == links.hoff[u] or links.far[h] != links.far[h - 1]:
                near[end] = links.far[h]
                end += 1
        nlast[u] = end
    return near[:end], nfirst, nlast


@inline
def _size(u, weight, near, nfirst, nlast):
    """The log of the combinations of a node's states and its neighbours'."""
    size = weight[u]
    for j in range(nfirst[u], nlast[u]):
        size += weight[near[j]]
    return size


@inline
def _fill_in(near, end, nfirst, nlast, u, around):
    """Makes the neighbours of a node that is no longer open neighbours of each other; returns where the list ends."""
    need = end
    for v in around:
        need += nlast[v] - nfirst[v] + len(around)
    if need > len(near):
        near = np.concatenate((near, np.empty(need, dtype=np.int64)))
    for v in around:
        begin, i, j = end, nfirst[v], 0
        pause()
        while i < nlast[v] or j < len(around):
            if j == len(around) or (i < nlast[v] and near[i] <= around[j]):
                w = near[i]
                j += j < len(around) and around[j] == w
                i += 1
            else:
                w = around[j]
                j += 1
            if w != u and w != v:
                near[end] = w
                end += 1
        nfirst[v], nlast[v] = begin, end
    return near, end


@kernel(pauses=True)
def cheapest(links, off, cost, buckets):
    """The least that a choice of the states that are alive costs, memory apart, and that choice."""
    num_nodes = len(off) - 1
    child, following = np.full(num_nodes, -1), np.full(num_nodes, -1)
    for k in range(num_nodes):
        p = buckets.parent[k]
        if p >= 0:
            following[k], child[p] = child[p], k
    least, best = np.full(buckets.table[-1], np.inf), np.zeros(buckets.table[-1], np.int64)
    total = 0.0
    for k in range(num_nodes):
        u, begin, size = buckets.order[k], buckets.table[k], buckets.table[k + 1] - buckets.table[k]
        sums = np.empty((buckets.sizes[u], size))
        for s in range(buckets.sizes[u]):
            sums[s] = cost[off[u] + buckets.state[off[u] + s]]
        _add_edges(links, off, buckets, k, sums)
        c = child[k]
        while c >= 0:
            own, jump = _jumps(buckets, c, k)
            _add(buckets, k, sums, least, buckets.table[c], own, jump)
            c = following[c]
        for s in range(len(sums)):
            pause()
            for j in range(size):
                if sums[s, j] < least[begin + j]:
                    least[begin + j], best[begin + j] = sums[s, j], s
        if buckets.parent[k] < 0:
            total += least[begin]
    choice, rank = np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int64)
    for k in range(num_nodes - 1, -1, -1):
        u, at = buckets.order[k], 0
        for j in range(buckets.first[k], buckets.first[k + 1]):
            at = at * buckets.sizes[buckets.scope[j]] + rank[buckets.scope[j]]
        rank[u] = best[buckets.table[k] + at]
        choice[u] = buckets.state[off[u] + rank[u]]
    return total, choice


@inline
def _add_edges(links, off, buckets, k, sums):
    """Adds the edges from a bucket's node to the nodes around."""
    u, first, last = buckets.order[k], buckets.first[k], buckets.first[k + 1]
    for h in range(links.hoff[u], links.hoff[u + 1]):
        v, jump = links.far[h], np.zeros(last - first, np.int64)
        for j in range(first, last):
            jump[j - first] = buckets.scope[j] == v
        if jump.any():
            pairs = np.empty(buckets.sizes[u] * buckets.sizes[v])
            for s in range(buckets.sizes[u]):
                begin = links.plane[h] + buckets.state[off[u] + s] * (off[v + 1] - off[v])
                for t in range(buckets.sizes[v]):
                    pairs[s * buckets.sizes[v] + t] = links.mats[begin + buckets.state[off[v] + t]]
            _add(buckets, k, sums, pairs, 0, buckets.sizes[v], jump)


@inline
def _jumps(buckets, c, k):
    """How far neighbouring states lie apart in the table of bucket c: those of the node of k, and of those around."""
    first, last = buckets.first[k], buckets.first[k + 1]
    own, jump, stride = 0, np.zeros(last - first, np.int64), 1
    for j in range(buckets.first[c + 1] - 1, buckets.first[c] - 1, -1):
        v = buckets.scope[j]
        if v == buckets.order[k]:
            own = stride
        for i in range(first, last):
            if buckets.scope[i] == v:
                jump[i - first] = stride
        stride *= buckets.sizes[v]
    return own, jump


@inline
def _add(buckets, k, sums, table, begin, own, jump):
    """Adds the entries of a table to all combinations of a bucket, in which they lie so far apart."""
    first, last = buckets.first[k], buckets.first[k + 1] - 1
    run, step = (buckets.sizes[buckets.scope[last]], jump[-1]) if len(jump) else (1, 0)
    seats, at = np.zeros(len(jump), np.int64), begin
    for j in range(0, sums.shape[1], run):
        pause()
        for s in range(len(sums)):
            line, here = place(at + s * own), place(j)
            for t in range(place(run)):
                sums[s, here + t] += table[line + t * place(step)]
        for i in range(last - first - 1, -1, -1):
            seats[i] += 1
            at += jump[i]
            if seats[i] < buckets.sizes[buckets.scope[first + i]]:
                break
            at -= jump[i] * seats[i]
            seats[i] = 0
