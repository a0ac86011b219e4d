"""Elimination: exact dynamic programming over the parts of a model, kept small by dual bounds.

Nodes are eliminated one by one. Eliminating a node makes a table with rows of cost and memory for each combination of
states of its open neighbours. Parts of the model that share no edge have separate tables, which are joined only at the
end; a search node by node would carry every combination of one part through the whole of the other.

A row is dropped by one of three rules. Bound: some dual (same model, other prices) puts the row plus the least that all
other tables add above the goal. Memory: the row does not fit with the least that all other tables take. Dominance:
another row of the same states costs no more and takes no more memory at any time that can still bind. No rule loses the
cheapest choice below the goal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.jit import inline, kernel, pause
from meshwright.solver.bounds.dual import Dual
from meshwright.solver.bounds.unlimited_minimum import arrange
from meshwright.solver.exact.elimination_tables import (
    Beam,
    Costs,
    Limits,
    fits,
    hash_of,
    new_rows,
    new_tables,
    node_bases,
    open_nodes,
    others_of,
    strictest,
    trace,
    two_alike,
    two_smallest,
)
from meshwright.solver.reductions.times import dense_usage
from meshwright.solver.tuning import TUNING, Tuning

_WIDEST = 24  # most open nodes around one table: the width of its array
_COMBINATIONS = 1.0 / np.finfo(np.float64).eps  # of states in all tables, beyond which their number is not exact


@dataclass(frozen=True)
class Found:
    """Result of an elimination.

    Attributes:
        choice: The cheapest choice that was found; None if none was.
        num_rows: How many rows were made.
        reached: Cost up to which the search was complete: the goal, unless rows were dropped to stay within the effort.
    """

    choice: np.ndarray | None
    num_rows: int
    reached: float


def eliminate(duals: Sequence[Dual], goal: float, effort: float, tuning: Tuning = TUNING) -> Found:
    """Searches all choices that no dual puts above the goal, or above a lower one as far as that takes too much effort.

    Args:
        duals: Duals of one model of at least one node; each is swept backward once more here.
        goal: Cost up to which to look, finite.
        effort: About how many rows to make in all, those with many times counting more.
        tuning: Options.
    """
    model, links = duals[0].model, duals[0].links
    alive = np.max([dual.floor for dual in duals], axis=0) <= goal
    bounds = np.array([dual.sweep_back() - float(dual.price @ model.cap) for dual in duals])
    base = np.empty((len(duals), len(model.cost)))
    for i, dual in enumerate(duals):
        node_bases(links, model.off, dual.theta, dual.m, base[i])
    budget = goal - bounds
    alive &= (base <= budget[:, None]).all(axis=0)
    buckets = arrange(links, model.off, alive, _COMBINATIONS, tuning.few_nodes)
    if buckets.combinations > _COMBINATIONS:
        return Found(None, 0, -np.inf)
    if buckets.sizes.min() == 0:
        return Found(None, 0, goal)
    costs = Costs(
        links, model.off, alive, base, np.stack([dual.m for dual in duals]), duals[0].spent(),
        np.ascontiguousarray(dense_usage(model).T), model.cap, budget,
    )  # fmt: skip
    limits = Limits(float(effort), _WIDEST, tuning.narrow_rows, tuning.compare_cost)
    lowered, choice, made = eliminate_all(costs, buckets.order, limits)
    return Found(choice if choice[0] >= 0 else None, int(made), goal - lowered)


@kernel(pauses=True)
def eliminate_all(costs, order, limits):
    """Eliminates all nodes in turn; returns by how much the goal was lowered, the cheapest choice (-1: none), the rows.

    The goal is lowered to minus infinity where a table would be too wide.
    """
    num_nodes, num_duals, num_times = len(costs.off) - 1, len(costs.budget), len(costs.cap)
    choice, nodes, dropped = np.full(num_nodes, -1), open_nodes(costs), np.zeros(2)
    each, effort, widest = 1.0 + num_times / 32.0, limits.effort, limits.widest
    room = int(effort / each)
    pool = new_rows(room + 2 * num_nodes * limits.narrow, num_duals, num_times, widest)
    new = new_rows(room // 2 + limits.narrow, num_duals, num_times, widest)  # a table has half of what is left
    tables = new_tables(2 * num_nodes, num_duals, num_times, widest)
    table, decided, made, n = 0, 0, 0.0, 0
    while True:
        u = order[decided] if decided < num_nodes else -1
        s, t = two_smallest(tables, table, u) if u >= 0 else two_alike(tables, table)
        if u < 0 and t < 0:
            break
        others = others_of(nodes, tables, table, s, t, u if t < 0 else -1)
        beam = Beam(max(limits.narrow, min(len(new.own), int(0.5 * (effort - made) / each))), dropped)
        if t >= 0:
            n = _join(costs, pool, tables, s, t, table, others, new, beam)
        else:
            n = _decide(costs, pool, tables, s, u, table, nodes, others, new, beam)
        if n < 0:
            return np.inf, choice, made
        made += (n + dropped[1]) * each
        dropped[1] = 0.0
        if n == 0:
            break
        pairs = (effort - made) / limits.compare_cost  # that may still be compared
        compare = max(limits.narrow, int(pairs / n))
        made += limits.compare_cost * _keep(costs, pool, tables, table, others, new, n, compare)
        if s >= 0:
            tables.live[s] = False
        if t >= 0:
            tables.live[t] = False
        else:
            nodes.open[u] = False
            decided += 1
        table += 1
    if n > 0:
        trace(pool, tables.first[table - 1], tables.first[table], choice)
    return dropped[0], choice, made


@inline
def _trim(costs, rows, n, limit, beam):
    """Drops the half of some rows with the highest bounds, and lowers the goal to the least of these."""
    slack = np.empty(n)
    for r in range(n):
        slack[r] = np.inf
        for i in range(len(limit)):
            slack[r] = min(slack[r], limit[i] - rows.excess[r, i])
    least, kept = np.sort(slack)[n // 2], 0
    for r in range(n):
        if slack[r] > least:
            rows.excess[kept], rows.load[kept], rows.seats[kept] = rows.excess[r], rows.load[r], rows.seats[r]
            rows.own[kept], rows.left[kept] = rows.own[r], rows.left[r]
            rows.right[kept], rows.node[kept] = rows.right[r], rows.node[r]
            kept += 1
    for i in range(len(limit)):
        limit[i] -= least
        costs.budget[i] -= least
    beam.dropped[0] += least
    beam.dropped[1] += n - kept
    return kept


@inline
def _join(costs, pool, tables, s, t, table, others, new, beam):
    """All pairs of rows of two tables that agree where both know a node; their number, or -1 where it is too wide."""
    width, shared, widest = tables.width[s], 0, tables.scope.shape[1]
    own_seat, far_seat = np.empty(widest, dtype=np.int64), np.empty(widest, dtype=np.int64)
    for j in range(width):
        tables.scope[table, j] = tables.scope[s, j]
    added = np.empty(widest, dtype=np.int64)
    for j in range(tables.width[t]):
        known = -1
        for i in range(tables.width[s]):
            if tables.scope[s, i] == tables.scope[t, j]:
                known = i
        if known >= 0:
            own_seat[shared], far_seat[shared] = known, j
            shared += 1
        elif width == widest:
            return -1
        else:
            tables.scope[table, width], added[width] = tables.scope[t, j], j
            width += 1
    tables.width[table] = width
    begin, end = tables.first[t], tables.first[t + 1]
    limit = costs.budget - others.excess
    strict = strictest(pool, tables, s, t, limit)
    keys = np.empty(end - begin, dtype=np.uint64)
    for r in range(begin, end):
        keys[r - begin] = hash_of(pool.seats, r, far_seat, shared)
    order = np.argsort(pool.excess[begin:end, strict], kind="mergesort")
    order = order[np.argsort(keys[order], kind="mergesort")]
    keys, mine, far, made = keys[order], pool.excess, pool.excess[begin:end][order], new.excess
    n = 0
    for a in range(tables.first[s], tables.first[s + 1]):
        pause()
        key = hash_of(pool.seats, a, own_seat, shared)
        for place in range(np.searchsorted(keys, key), len(keys)):
            pause()
            if keys[place] != key or mine[a, strict] + far[place, strict] > limit[strict]:
                break
            if n == beam.most:
                n = _trim(costs, new, n, limit, beam)
            within = True
            for i in range(len(limit)):
                made[n, i] = mine[a, i] + far[place, i]
                within = within and made[n, i] <= limit[i]
            if within and _joined(costs, pool, a, begin + order[place], others, new, n):
                for j in range(width):
                    new.seats[n, j] = (
                        pool.seats[a, j] if j < tables.width[s] else pool.seats[begin + order[place], added[j]]
                    )
                n += 1
    return n


@inline
def _joined(costs, pool, a, b, others, new, n):
    """Writes the sum of two rows but for its states; tells whether it fits."""
    for i in range(len(costs.cap)):
        new.load[n, i] = pool.load[a, i] + pool.load[b, i]
    new.own[n] = pool.own[a] + pool.own[b]
    new.left[n], new.right[n], new.node[n] = a, b, -1
    return fits(costs, others, new.load, n)


@inline
def _decide(costs, pool, tables, s, u, table, nodes, others, new, beam):
    """Rows with a node decided, for all states of the open nodes around; their number, or -1 where it is too wide."""
    links, off, num_duals = costs.links, costs.off, len(costs.budget)
    before = tables.width[s] if s >= 0 else 0
    at, width = -1, 0
    for j in range(before):
        if tables.scope[s, j] == u:
            at = j
        else:
            tables.scope[table, width] = tables.scope[s, j]
            width += 1
    first = width
    edges = np.full(links.hoff[u + 1] - links.hoff[u], -1)  # the place of each neighbour in the table's scope
    for j in range(len(edges)):
        v = links.far[links.hoff[u] + j]
        if not nodes.open[v]:
            continue
        for i in range(width):
            if tables.scope[table, i] == v:
                edges[j] = i
        if edges[j] < 0:
            if width == tables.scope.shape[1]:
                return -1
            tables.scope[table, width], edges[j] = v, width
            width += 1
    tables.width[table] = width
    limit = costs.budget - others.excess
    excess, own = np.empty((width - first + 1, num_duals)), np.empty(width - first + 1)
    seats, load = np.zeros(width + 1, dtype=np.int64), np.empty((1, len(costs.cap)))
    begin, end = (tables.first[s], tables.first[s + 1]) if s >= 0 else (0, 1)
    scope, n = tables.scope[table], 0
    for r in range(begin, end):
        pause()
        for j in range(before):
            if j != at:
                seats[j if at < 0 or j < at else j - 1] = pool.seats[r, j]
        known = np.int64(pool.seats[r, at]) if at >= 0 else -1
        for state in range(max(known, 0), known + 1 if at >= 0 else off[u + 1] - off[u]):
            if not costs.alive[off[u] + state]:
                continue
            for i in range(len(costs.cap)):
                load[0, i] = costs.usage[off[u] + state, i] + (pool.load[r, i] if s >= 0 else 0.0)
            for i in range(num_duals):
                excess[0, i] = costs.base[i, off[u] + state] + (pool.excess[r, i] if s >= 0 else 0.0)
            own[0] = costs.base[0, off[u] + state] - costs.extra[off[u] + state] + (pool.own[r] if s >= 0 else 0.0)
            if not fits(costs, others, load, 0):
                continue
            if not _add_edges(costs, u, state, edges, 0, first, seats, excess, own, 0, limit):
                continue
            n = _around(
                costs, nodes, u, state, edges, first, width, scope, seats, excess, own, limit, load,
                r if s >= 0 else -1, new, n, beam,
            )  # fmt: skip
    return n


@inline
def _around(costs, nodes, u, state, edges, first, width, scope, seats, excess, own, limit, load, left, new, n, beam):
    """Appends a row for every combination of states of the neighbours that no table knew yet."""
    depth = first
    if depth < width:
        seats[depth] = -1
    while depth >= first:
        pause()
        if depth == width:
            if n == beam.most:
                n = _trim(costs, new, n, limit, beam)
            new.own[n] = own[width - first]
            for i in range(len(limit)):
                new.excess[n, i] = excess[width - first, i]
            for i in range(len(costs.cap)):
                new.load[n, i] = load[0, i]
            for j in range(width):
                new.seats[n, j] = seats[j]
            new.left[n], new.right[n], new.node[n] = left, state, u
            n += 1
            depth -= 1
            continue
        seats[depth] += 1
        v = scope[depth]
        if seats[depth] == costs.off[v + 1] - costs.off[v]:
            depth -= 1
            continue
        if not costs.alive[costs.off[v] + seats[depth]]:
            continue
        here = depth - first + 1
        own[here] = own[here - 1]
        for i in range(len(limit)):
            excess[here, i] = excess[here - 1, i]
        needed = _add_edges(costs, u, state, edges, depth, depth + 1, seats, excess, own, here, limit)
        for i in range(len(limit)):  # what the neighbour's own state adds is counted once it is decided
            needed = needed and excess[here, i] + costs.base[i, costs.off[v] + seats[depth]] <= limit[i]
        if needed:
            depth += 1
            if depth < width:
                seats[depth] = -1
    return n


@inline
def _add_edges(costs, u, state, edges, begin, end, seats, excess, own, here, limit):
    """Adds the edges to the neighbours in some places of the scope; returns whether the row may still be needed."""
    links = costs.links
    for j in range(len(edges)):
        if begin <= edges[j] < end:
            h = links.hoff[u] + j
            v, other = links.far[h], seats[edges[j]]
            pair = links.mats[links.plane[h] + state * (costs.off[v + 1] - costs.off[v]) + other]
            for i in range(len(limit)):
                more = (
                    pair - costs.messages[i, links.msg[h] + state] - costs.messages[i, links.msg[links.back[h]] + other]
                )
                excess[here, i] += more
                if i == 0:
                    own[here] += more
                if not excess[here, i] <= limit[i]:
                    return False
    return True


@inline
def _keep(costs, pool, tables, table, others, new, n, compare):
    """Keeps the rows that no other of the same states makes needless; returns how many pairs were compared."""
    num_times, width = len(costs.cap), tables.width[table]
    places, keys = np.arange(width), np.empty(n, dtype=np.uint64)
    for i in range(n):
        keys[i] = hash_of(new.seats, i, places, width)
    order = np.argsort(new.own[:n], kind="mergesort")
    if width > 0:
        order = order[np.argsort(keys[order], kind="mergesort")]
    loads, mine = np.empty((min(compare, n), num_times)), np.empty(num_times)
    for i in range(len(costs.budget)):
        tables.excess[table, i] = np.inf
    for t in range(num_times):
        tables.least[table, t], tables.most[table, t] = np.inf, 0.0
    end, group, pairs = tables.first[table], 0, 0
    for i in range(n):
        c = order[i]
        if i == 0 or keys[c] != keys[order[i - 1]]:
            group = 0
        for t in range(num_times):
            mine[t] = max(new.load[c, t], costs.cap[t] - others.most[t])
        size, within = min(group, len(loads)), False
        for g in range(size):
            pause()
            pairs += 1
            within = True
            for t in range(num_times):
                if loads[g, t] > mine[t]:
                    within = False
                    break
            if within:  # it moves up, for it may do so again
                for t in range(num_times):
                    higher = loads[g // 2, t]
                    loads[g // 2, t] = loads[g, t]
                    loads[g, t] = higher
                break
        if within:
            continue
        for t in range(num_times):
            if group < len(loads):
                loads[group, t] = mine[t]
            pool.load[end, t] = new.load[c, t]
            tables.least[table, t] = min(tables.least[table, t], new.load[c, t])
            tables.most[table, t] = max(tables.most[table, t], new.load[c, t])
        for i in range(len(costs.budget)):
            pool.excess[end, i] = new.excess[c, i]
            tables.excess[table, i] = min(tables.excess[table, i], new.excess[c, i])
        for j in range(width):
            pool.seats[end, j] = new.seats[c, j]
        pool.own[end], pool.left[end] = new.own[c], new.left[c]
        pool.right[end], pool.node[end] = new.right[c], new.node[c]
        group, end = group + 1, end + 1
    tables.first[table + 1], tables.live[table] = end, True
    return pairs
