"""Tables of an elimination: rows in long arrays, the open nodes around each table, and which are joined first."""

from typing import NamedTuple

import numpy as np

from meshwright.jit import inline, kernel
from meshwright.solver.model.half_edges import Links


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


class Limits(NamedTuple):
    """How much work an elimination may do; the entries of `Tuning` that its kernel reads."""

    effort: float
    widest: int
    narrow: int
    compare_cost: float


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
    least: np.ndarray  # float64 [nodes, times], memory of the states that are alive
    most: np.ndarray  # float64 [nodes, times]


class Beam(NamedTuple):
    """How many rows a table may have, and what was dropped where it would have had more.

    Attributes:
        most: Number of rows at which the more expensive half is dropped.
        dropped: float64 [2], by how much the goal is lower now, and how many rows were dropped in this step.
    """

    most: int
    dropped: np.ndarray


class Others(NamedTuple):
    """What the other live tables and open nodes add to the cost at least, and their least and most memory."""

    excess: np.ndarray  # float64 [duals]
    least: np.ndarray  # float64 [times]
    most: np.ndarray  # float64 [times]


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
    """All nodes."""
    num_nodes, num_times = len(costs.off) - 1, len(costs.cap)
    least, most = np.full((num_nodes, num_times), np.inf), np.zeros((num_nodes, num_times))
    for u in range(num_nodes):
        for s in range(costs.off[u], costs.off[u + 1]):
            if costs.alive[s]:
                for t in range(num_times):
                    least[u, t] = min(least[u, t], costs.usage[s, t])
                    most[u, t] = max(most[u, t], costs.usage[s, t])
    return Nodes(np.ones(num_nodes, dtype=np.bool_), least, most)


@inline
def two_smallest(tables, count, u):
    """The two live tables with fewest rows around a node; -1 where there are less."""
    s, t = -1, -1
    for i in range(count):
        if not tables.live[i]:
            continue
        for j in range(tables.width[i]):
            if tables.scope[i, j] == u:
                s, t = _smaller(tables, i, s, t)
    return s, t


@inline
def two_alike(tables, count):
    """The two live tables with fewest rows: of those without any spread in memory, else of the others, else of all.

    Tables without any spread in memory are joined with each other first, since dominance then leaves few of their
    rows; joined with large tables one by one, they would multiply the rows of these.
    """
    small, smaller, large, larger = -1, -1, -1, -1
    for i in range(count):
        if tables.live[i]:
            alike = True
            for t in range(tables.most.shape[1]):
                alike = alike and tables.most[i, t] <= tables.least[i, t]
            if alike:
                small, smaller = _smaller(tables, i, small, smaller)
            else:
                large, larger = _smaller(tables, i, large, larger)
    if smaller >= 0:
        return small, smaller
    if larger >= 0 or small < 0:
        return large, larger
    return (small, large) if large >= 0 else (small, -1)


@inline
def _smaller(tables, i, s, t):
    """The two of three tables with fewest rows."""
    size = tables.first[i + 1] - tables.first[i]
    if s < 0 or size < tables.first[s + 1] - tables.first[s]:
        return i, s
    if t < 0 or size < tables.first[t + 1] - tables.first[t]:
        return s, i
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
def fits(costs, others, loads, row):
    """Whether one of some loads leaves room for the least that all others take."""
    within = True
    for t in range(len(costs.cap)):
        within = within and loads[row, t] + others.least[t] <= costs.cap[t] * (1 + 1e-12)
    return within


@inline
def strictest(pool, tables, s, t, limit):
    """The dual by which fewest pairs of rows of two tables are within its limit, whatever they share."""
    best, fewest = 0, np.inf
    for i in range(len(limit)):
        mine = np.sort(pool.excess[tables.first[s] : tables.first[s + 1], i])
        far = np.sort(pool.excess[tables.first[t] : tables.first[t + 1], i])
        pairs, place = 0, len(far)
        for value in mine:
            while place > 0 and value + far[place - 1] > limit[i]:
                place -= 1
            pairs += place
        if pairs < fewest:
            best, fewest = i, pairs
    return best


@inline
def hash_of(seats, row, places, count):
    """A 64-bit hash of the states in some places of a row."""
    key = np.uint64(0)
    for j in range(count):
        key += mix(j, seats[row, places[j]])
    return key


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


@kernel
def node_bases(links, off, theta, m, base):
    """base(s) = θ_u + Σ m, less its minimum."""
    for u in range(len(off) - 1):
        least = np.inf
        for s in range(off[u + 1] - off[u]):
            value = theta[off[u] + s]
            for h in range(links.hoff[u], links.hoff[u + 1]):
                value += m[links.msg[h] + s]
            base[off[u] + s] = value
            least = min(least, value)
        for s in range(off[u + 1] - off[u]):
            base[off[u] + s] -= least


@inline
def mix(node, state):
    """A 64-bit hash of one node's state, summed up over the states of a row."""
    z = np.uint64(node * 1000003 + state + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return z ^ (z >> np.uint64(27))
