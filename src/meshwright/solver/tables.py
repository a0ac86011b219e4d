"""Tables of an elimination: rows in long arrays, the open nodes around each table, and the order of elimination."""

from typing import NamedTuple

import numpy as np

from meshwright.solver.dual import Dual
from meshwright.solver.frontier import mix
from meshwright.solver.kernel import inline, kernel
from meshwright.solver.links import Links

_MOST_NODES = 4000


class Costs(NamedTuple):
    """What the kernels read: the duals' views of one model."""

    links: Links
    off: np.ndarray  # int64 [nodes + 1]
    alive: np.ndarray  # bool [states], whether it may be part of a choice below the goal
    base: np.ndarray  # float64 [duals, states], what a state adds to each dual's bound
    messages: np.ndarray  # float64 [duals, messages]
    extra: np.ndarray  # float64 [states], what the first dual counts for memory
    usage: np.ndarray  # float64 [states, times]
    cap: np.ndarray  # float64 [times]
    budget: np.ndarray  # float64 [duals], what a choice may add to each dual's bound


class Rows(NamedTuple):
    """Rows of tables, one after the other; or rows in the making."""

    excess: np.ndarray  # float64 [rows, duals]
    own: np.ndarray  # float64 [rows], the cost without prices, up to a constant
    load: np.ndarray  # float64 [rows, times]
    seats: np.ndarray  # int32 [rows, widest], states of the open nodes around
    left: np.ndarray  # int64 [rows], the row that this one was made from, or -1
    right: np.ndarray  # int64 [rows], the row of another table that it was joined with, or the state that was decided
    node: np.ndarray  # int64 [rows], the node that was decided, or -1 where two rows were joined


class Tables(NamedTuple):
    """Where each table's rows lie, the open nodes around it, and the least and most of its rows."""

    first: np.ndarray  # int64 [tables + 1]
    width: np.ndarray  # int64 [tables]
    scope: np.ndarray  # int64 [tables, widest]
    live: np.ndarray  # bool [tables], whether it is part of no other one
    excess: np.ndarray  # float64 [tables, duals], the least of its rows
    least: np.ndarray  # float64 [tables, times]
    most: np.ndarray  # float64 [tables, times]


class Nodes(NamedTuple):
    """What is known of the nodes that are open."""

    open: np.ndarray  # bool [nodes]
    weight: np.ndarray  # float64 [nodes], the log of the number of states that are alive
    least: np.ndarray  # float64 [nodes, times], memory of the states that are alive
    most: np.ndarray  # float64 [nodes, times]


class Others(NamedTuple):
    """What all that is not looked at adds at least and takes at least and at most: live tables and open nodes."""

    excess: np.ndarray  # float64 [duals]
    least: np.ndarray  # float64 [times]
    most: np.ndarray  # float64 [times]


def combinations(dual: Dual, goal: float, most: float) -> float:
    """About how many rows elimination makes: all combinations of states in its tables, whatever memory they take.

    Counted until they are more than the most that matter.
    """
    model = dual.model
    if model.num_nodes > _MOST_NODES:
        return np.inf
    return num_combinations(dual.links, model.off, dual.floor <= goal, most)


@kernel
def num_combinations(links, off, alive, most):
    """The combinations of states that all tables of an elimination would tell apart."""
    num_nodes = len(off) - 1
    weight = np.empty(num_nodes)
    for u in range(num_nodes):
        weight[u] = np.log(max(alive[off[u] : off[u + 1]].sum(), 1))
    is_open = np.ones(num_nodes, dtype=np.bool_)
    near, nfirst, nlast = neighbours(links, num_nodes)
    total = 0.0
    for _ in range(num_nodes):
        u, size = next_node(is_open, weight, near, nfirst, nlast)
        total += np.exp(size)
        if total > most:
            break
        is_open[u] = False
        near = fill_in(near, nfirst, nlast, u)
    return total


@inline
def new_rows(size, num_duals, num_times, widest):
    """Room for rows, which takes memory only as far as it is used."""
    return Rows(
        np.empty((size, num_duals)),
        np.empty(size),
        np.empty((size, num_times)),
        np.empty((size, widest), dtype=np.int32),
        np.empty(size, dtype=np.int64),
        np.empty(size, dtype=np.int64),
        np.empty(size, dtype=np.int64),
    )


@inline
def new_tables(size, num_duals, num_times, widest):
    return Tables(
        np.zeros(size + 1, dtype=np.int64),
        np.zeros(size, dtype=np.int64),
        np.empty((size, widest), dtype=np.int64),
        np.zeros(size, dtype=np.bool_),
        np.empty((size, num_duals)),
        np.empty((size, num_times)),
        np.empty((size, num_times)),
    )


@inline
def open_nodes(costs):
    """All nodes; one of negative weight has no state that may be chosen."""
    num_nodes, num_times = len(costs.off) - 1, len(costs.cap)
    weight = np.empty(num_nodes)
    least, most = np.full((num_nodes, num_times), np.inf), np.zeros((num_nodes, num_times))
    for u in range(num_nodes):
        count = 0
        for s in range(costs.off[u], costs.off[u + 1]):
            for i in range(len(costs.budget)):
                costs.alive[s] = costs.alive[s] and costs.base[i, s] <= costs.budget[i]
            if costs.alive[s]:
                count += 1
                for t in range(num_times):
                    least[u, t] = min(least[u, t], costs.usage[s, t])
                    most[u, t] = max(most[u, t], costs.usage[s, t])
        weight[u] = np.log(count) if count else -1.0
    return Nodes(np.ones(num_nodes, dtype=np.bool_), weight, least, most)


@inline
def neighbours(links, num_nodes):
    """Every node's neighbours in order, in one list that grows as others come to share a table with it."""
    nfirst, nlast = links.hoff[:-1].copy(), links.hoff[1:].copy()
    near = links.far.astype(np.int64)
    return near, nfirst, nlast


@inline
def next_node(is_open, weight, near, nfirst, nlast):
    """The open node with fewest combinations of its states and its neighbours', and their log; -1 where none is."""
    best, least = -1, np.inf
    for u in range(len(is_open)):
        if is_open[u]:
            size = weight[u]
            for j in range(nfirst[u], nlast[u]):
                size += weight[near[j]]
            if size < least:
                best, least = u, size
    return best, least


@inline
def fill_in(near, nfirst, nlast, u):
    """Makes the neighbours of a node that is no longer open neighbours of each other."""
    mine = near[nfirst[u] : nlast[u]].copy()
    need = 0
    for v in mine:
        need += nlast[v] - nfirst[v] + len(mine)
    end = len(near)
    larger = np.empty(end + need, dtype=np.int64)
    larger[:end] = near
    for v in mine:
        begin, i, j = end, nfirst[v], 0
        while i < nlast[v] or j < len(mine):
            if j == len(mine) or (i < nlast[v] and larger[i] <= mine[j]):
                w = larger[i]
                j += j < len(mine) and mine[j] == w
                i += 1
            else:
                w = mine[j]
                j += 1
            if w != u and w != v:
                larger[end] = w
                end += 1
        nfirst[v], nlast[v] = begin, end
    return larger[:end]


@inline
def two_smallest(tables, count, u):
    """The two live tables with fewest rows around a node, or of all where it is -1; -1 where there are less."""
    s, t = -1, -1
    for i in range(count):
        if not tables.live[i]:
            continue
        around = u < 0
        for j in range(tables.width[i]):
            around = around or tables.scope[i, j] == u
        if around:
            size = tables.first[i + 1] - tables.first[i]
            if s < 0 or size < tables.first[s + 1] - tables.first[s]:
                s, t = i, s
            elif t < 0 or size < tables.first[t + 1] - tables.first[t]:
                t = i
    return s, t


@inline
def others_of(nodes, tables, count, s, t, u):
    """What all but two tables and a node add."""
    num_times = nodes.least.shape[1]
    excess, least, most = np.zeros(tables.excess.shape[1]), np.zeros(num_times), np.zeros(num_times)
    for v in range(len(nodes.open)):
        if nodes.open[v] and v != u:
            for j in range(num_times):
                least[j] += nodes.least[v, j]
                most[j] += nodes.most[v, j]
    for i in range(count):
        if tables.live[i] and i != s and i != t:
            for j in range(len(excess)):
                excess[j] += tables.excess[i, j]
            for j in range(num_times):
                least[j] += tables.least[i, j]
                most[j] += tables.most[i, j]
    return Others(excess, least, most)


@inline
def fits(costs, others, load):
    """Whether a load leaves room for the least that all others take."""
    within = True
    for t in range(len(load)):
        within = within and load[t] + others.least[t] <= costs.cap[t] * (1 + 1e-12)
    return within


@inline
def hash_of(seats, places, count):
    """A 64-bit hash of the states in some places."""
    key = np.uint64(0)
    for j in range(count):
        key += mix(j, seats[places[j]])
    return key


@inline
def first_within(loads, size, mine):
    """The first of some loads that is nowhere above one's own, or their number; it moves up, for it may do so again."""
    num_times = len(mine)
    for g in range(size):
        within = True
        for t in range(num_times):
            if loads[g, t] > mine[t]:
                within = False
                break
        if within:
            up = g // 2
            for t in range(num_times):
                loads[g, t], loads[up, t] = loads[up, t], loads[g, t]
            return g
    return size


@inline
def trace(pool, begin, end, choice):
    """Reads the choice behind the cheapest row of the last table."""
    stack = [begin + np.argmin(pool.own[begin:end])]
    while len(stack):
        row = stack.pop()
        if row < 0:
            continue
        stack.append(pool.left[row])
        if pool.node[row] >= 0:
            choice[pool.node[row]] = pool.right[row]
        else:
            stack.append(pool.right[row])
