"""Frontier search: exact dynamic programming over partial choices, kept small by dual bounds.

Nodes are decided in order. A partial choice is a label: what each of a few duals (same model, prices scaled up or
down) says any completion costs at least, its own cost, the states of the decided nodes that still have undecided
neighbours, and the memory spent at every time. Labels that some dual puts above the goal are dropped: one that spent
much memory is caught by high prices, one that spent little by low ones. Of two labels with equal frontier states, one
that costs no more and uses no more at any time that can still bind replaces the other. Without a drop for lack of room
the result is proven; with drops it is a beam search.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.jit import inline, kernel
from meshwright.solver.bounds.dual import Dual
from meshwright.solver.reductions.times import dense_usage

_NARROW = 8  # labels kept once the effort is spent: what is left is a beam search
_MOST_COMPARED = 64  # labels of equal frontier that a new one is compared with


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Attributes:
        choice: The cheapest choice met; None if none.
        num_labels: How many labels or rows were made.
        reached: Cost up to which nothing was left out: the goal, unless some were dropped for room.
    """

    choice: np.ndarray | None
    num_labels: int
    reached: float


def search(duals: Sequence[Dual], goal: float, width: int, effort: float = np.inf) -> Found:
    """Searches all choices that no dual puts above the goal.

    Args:
        duals: Duals of one model, numbered in the order of decision; each is swept backward once more here.
        goal: Cost up to which to look.
        width: Most labels to keep after each node.
        effort: Most labels to make in all, those with many times counting more; beyond it few are kept.
    """
    model, links = duals[0].model, duals[0].links
    num_nodes = model.num_nodes
    if num_nodes == 0:
        return Found(np.zeros(0, dtype=np.int64), 1, goal)
    slots, slot = slots_of(links, num_nodes)
    num_times = len(model.cap)
    width = int(max(16, min(width, effort, 3e7 // max(num_times, 1))))
    compare = max(2, min(_MOST_COMPARED, 4096 // max(num_times, 1)))
    # After a backward sweep the costs lie on the early nodes: the labels grow dear as soon as they can.
    bounds = np.array([dual.sweep_back() - float(dual.price @ model.cap) for dual in duals])
    base = np.empty((len(duals), len(model.cost)))
    for i, dual in enumerate(duals):
        node_bases(links, model.off, dual.theta, dual.m, base[i])
    messages = np.stack([dual.m for dual in duals])
    extra = duals[0].spent()
    touched, tfirst, tuse, ufirst, room = usage_by_node(model.off, dense_usage(model))
    parents = np.empty((num_nodes, width), dtype=np.int32)
    states = np.empty((num_nodes, width), dtype=np.int32)
    size, complete, most = advance_all(
        links, model.off, base, extra, messages, slot, slots, touched, tfirst, tuse, ufirst, room, model.cap,
        goal - bounds, width, effort, compare, _NARROW, parents, states,
    )  # fmt: skip
    reached = goal if complete else -np.inf
    if size == 0:
        return Found(None, int(most), reached)
    choice = np.empty(num_nodes, dtype=np.int64)
    label = 0  # the kernel leaves the cheapest label first
    for u in range(num_nodes - 1, -1, -1):
        choice[u] = states[u, label]
        label = parents[u, label]
    return Found(choice, int(most), reached)


@kernel
def slots_of(links, num_nodes):
    """Gives every node a column of the label table for as long as it is in the frontier; and its last neighbour."""
    slot = np.full((2, num_nodes), -1)
    leaves = np.full(num_nodes, -1)  # the node with whose decision each column becomes free
    count = 1
    for u in range(num_nodes):
        if links.hoff[u + 1] > links.split[u]:
            slot[1, u] = links.far[links.hoff[u + 1] - 1]  # half-edges are in the order of their far nodes
            column = 0
            while leaves[column] >= u:
                column += 1
            slot[0, u], leaves[column] = column, slot[1, u]
            count = max(count, column + 1)
    return count, slot


@kernel
def usage_by_node(off, dense):
    """For every node the times it touches, its usage over (state, touched time), and what later nodes may still add."""
    num_times, num_nodes = len(dense), len(off) - 1
    touched, tfirst = np.empty(num_nodes * num_times, dtype=np.int64), np.zeros(num_nodes + 1, dtype=np.int64)
    tuse, ufirst = np.empty(dense.size), np.zeros(num_nodes + 1, dtype=np.int64)
    room = np.zeros((num_nodes + 1, num_times))  # most that the nodes from u on can add
    for u in range(num_nodes):
        end = tfirst[u]
        for t in range(num_times):
            room[u, t] = dense[t, off[u] : off[u + 1]].max()
            if room[u, t] > 0:
                touched[end] = t
                end += 1
        count = end - tfirst[u]
        for s in range(off[u + 1] - off[u]):
            for j in range(count):
                tuse[ufirst[u] + s * count + j] = dense[touched[tfirst[u] + j], off[u] + s]
        tfirst[u + 1], ufirst[u + 1] = end, ufirst[u] + count * (off[u + 1] - off[u])
    for u in range(num_nodes - 1, -1, -1):
        room[u] += room[u + 1]
    return touched[: tfirst[num_nodes]], tfirst, tuse[: ufirst[num_nodes]], ufirst, room


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
    """A 64-bit hash of one node's state, summed up over the frontier."""
    z = np.uint64(node * 1000003 + state + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return z ^ (z >> np.uint64(27))


@kernel(interpretable=False)
def advance_all(
    links, off, base, extra, m, slot, slots, touched, tfirst, tuse, ufirst, room, cap, budget, width, effort,
    compare, narrow, parents, states,
):  # fmt: skip
    """Decides all nodes in turn; returns the number of final labels, whether none was dropped, and the most held."""
    num_nodes, num_times = len(off) - 1, len(cap)
    most = 4 * width
    cost, own, load = np.zeros((1, len(budget))), np.zeros(1), np.zeros((1, num_times))
    front = np.zeros((1, slots), dtype=np.int32)
    complete, peak, made = True, 1, 0.0
    for u in range(num_nodes):
        c_cost, c_own, c_from, c_state, fits_all = _extend(
            links, off, base, extra, m, slot, touched, tfirst, tuse, ufirst, room, cap, budget, u, cost, own, load,
            front, most,
        )  # fmt: skip
        complete = complete and fits_all
        made += len(c_cost) * (1.0 + num_times / 32.0)
        if made > effort:
            width = min(width, narrow)
        if len(c_cost) == 0:
            return 0, complete, peak
        keys = _keys(slot, off, u, front, c_from, c_state)
        kept, fits = _select(
            keys, c_cost, c_own, c_from, c_state, load, touched, tfirst, tuse, ufirst, room, cap, budget, u, width,
            compare, u == num_nodes - 1,
        )  # fmt: skip
        complete = complete and fits
        size = len(kept)
        peak = max(peak, size)
        cost, own = c_cost[kept], c_own[kept]
        new_load = np.empty((size, num_times))
        new_front = np.empty((size, slots), dtype=np.int32)
        for i in range(size):
            parent, state = c_from[kept[i]], c_state[kept[i]]
            parents[u, i], states[u, i] = parent, state
            new_front[i] = front[parent]
            if slot[0, u] >= 0:
                new_front[i, slot[0, u]] = state
            _new_load(load[parent], new_load[i], touched, tfirst, tuse, ufirst, room, cap, u, state)
        load, front = new_load, new_front
    return len(cost), complete, peak


@inline
def _new_load(old, new, touched, tfirst, tuse, ufirst, room, cap, u, state):
    """Adds u's usage; loads that can no longer bind are raised to one value, so that such labels compare equal."""
    begin, count = tfirst[u], tfirst[u + 1] - tfirst[u]
    new[:] = old
    for j in range(count):
        new[touched[begin + j]] += tuse[ufirst[u] + state * count + j]
    for t in range(len(cap)):
        new[t] = max(new[t], cap[t] - room[u + 1, t])


@inline
def _extend(
    links, off, base, extra, m, slot, touched, tfirst, tuse, ufirst, room, cap, budget, u, cost, own, load, front, most
):
    """All labels with one more node decided, within the budget and the caps; at most `most` of them."""
    k, num_duals = off[u + 1] - off[u], len(budget)
    begin, count = tfirst[u], tfirst[u + 1] - tfirst[u]
    size = min(most, len(cost) * k)
    c_cost, c_own = np.empty((size, num_duals)), np.empty(size)
    c_from, c_state = np.empty(size, dtype=np.int32), np.empty(size, dtype=np.int32)
    add = np.empty((num_duals, k))
    n = 0
    for label in range(len(cost)):
        _added(links, off, base, m, slot, u, front[label], add)
        for s in range(k):
            fits = True
            for i in range(num_duals):
                fits = fits and cost[label, i] + add[i, s] <= budget[i]
            if not fits:
                continue
            for j in range(count):
                t = touched[begin + j]
                if load[label, t] + tuse[ufirst[u] + s * count + j] > cap[t] * (1 + 1e-12):
                    fits = False
                    break
            if not fits:
                continue
            if n == size:
                return c_cost[:n], c_own[:n], c_from[:n], c_state[:n], False
            for i in range(num_duals):
                c_cost[n, i] = cost[label, i] + add[i, s]
            c_own[n] = own[label] + add[0, s] - extra[off[u] + s]
            c_from[n], c_state[n] = label, s
            n += 1
    return c_cost[:n], c_own[:n], c_from[:n], c_state[:n], True


@inline
def _added(links, off, base, m, slot, u, front, add):
    """What every dual's bound rises by with each state of u, given the decided neighbours."""
    k = off[u + 1] - off[u]
    for i in range(len(base)):
        for s in range(k):
            add[i, s] = base[i, off[u] + s]
        for h in range(links.hoff[u], links.split[u]):
            x = front[slot[0, links.far[h]]]
            line = links.plane[links.back[h]] + x * k
            moved = m[i, links.msg[links.back[h]] + x]
            for s in range(k):
                add[i, s] += links.mats[line + s] - m[i, links.msg[h] + s] - moved


@inline
def _keys(slot, off, u, front, c_from, c_state):
    """A hash of the states of all decided nodes (u included) that still have an undecided neighbour."""
    held = np.empty(u, dtype=np.int64)
    count = 0
    for v in range(u):
        if slot[1, v] > u:
            held[count] = v
            count += 1
    keys = np.empty(len(c_from), dtype=np.uint64)
    for i in range(len(c_from)):
        key = np.uint64(0)
        for j in range(count):
            key += mix(held[j], front[c_from[i], slot[0, held[j]]])
        if slot[1, u] > u:
            key += mix(u, c_state[i])
        keys[i] = key
    return keys


@inline
def _select(
    keys, c_cost, c_own, c_from, c_state, load, touched, tfirst, tuse, ufirst, room, cap, budget, u, width,
    compare, last,
):  # fmt: skip
    """Drops dominated labels among those with equal keys, then all but the `width` of least priced cost."""
    by_own = np.argsort(c_own, kind="mergesort")
    order = by_own[np.argsort(keys[by_own], kind="mergesort")]
    num_times = len(cap)
    kept = np.empty(len(keys), dtype=np.int64)
    loads = np.empty((compare, num_times))
    mine = np.empty(num_times)
    n, group = 0, 0
    for i in range(len(order)):
        c = order[i]
        if i == 0 or keys[c] != keys[order[i - 1]]:
            group = 0
        if num_times == 0:
            if group == 0:
                kept[n] = c
                n, group = n + 1, 1
            continue
        _new_load(load[c_from[c]], mine, touched, tfirst, tuse, ufirst, room, cap, u, c_state[c])
        dominated = False
        for g in range(min(group, compare)):
            if num_times == 1:
                g = (group - 1) % compare  # in order of cost, the last kept uses least
            better = True
            for t in range(num_times):
                if loads[g, t] > mine[t]:
                    better = False
                    break
            if better or num_times == 1:
                dominated = better
                break
        if not dominated:
            if group < compare or num_times == 1:
                loads[group % compare] = mine
            kept[n] = c
            n, group = n + 1, group + 1
    kept = kept[:n]
    if last:
        return kept[np.argsort(c_own[kept], kind="mergesort")][:width], n <= width
    if n > width:
        worst = np.empty(n)
        for i in range(n):
            worst[i] = (c_cost[kept[i]] - budget).max()
        return kept[np.argsort(worst, kind="mergesort")][:width], False
    return kept, True
