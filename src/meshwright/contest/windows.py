"""Windows: the part of a model that a few nodes make up while all others keep their states."""

from typing import NamedTuple

import numpy as np

from meshwright.jit import kernel
from meshwright.solver.model.half_edges import Links
from meshwright.solver.model.model import Model


class RowIndex(NamedTuple):
    """Rows by node: those of u are order[first[u]:first[u + 1]]."""

    first: np.ndarray
    order: np.ndarray


def index_rows(model: Model) -> RowIndex:
    order = np.argsort(model.rnode, kind="stable")
    return RowIndex(np.searchsorted(model.rnode[order], np.arange(model.num_nodes + 1)), order)


def cut_window(
    model: Model,
    links: Links,
    rows: RowIndex,
    nodes: np.ndarray,
    choice: np.ndarray,
    load: np.ndarray,
    active: np.ndarray,
) -> Model:
    """The model of the given nodes: edges to others priced at their states, caps less what the others use.

    Only the active times are kept; the caller checks the others afterwards.
    """
    number = np.full(model.num_nodes, -1, dtype=np.int32)
    number[nodes] = np.arange(len(nodes), dtype=np.int32)
    sizes = np.diff(model.off)
    off = np.concatenate([[0], np.cumsum(sizes[nodes])]).astype(np.int64)
    cost = np.empty(off[-1])
    num_edges, num_entries = window_costs(model.off, model.cost, links, nodes, number, choice, off, cost)
    eu, ev = np.empty(num_edges, dtype=np.int32), np.empty(num_edges, dtype=np.int32)
    eoff, mat = np.empty(num_edges, dtype=np.int64), np.empty(num_entries)
    window_edges(model.off, links, nodes, number, eu, ev, eoff, mat)
    own = np.concatenate([rows.order[rows.first[u] : rows.first[u + 1]] for u in nodes])
    place = np.concatenate([[0], np.cumsum(active)]).astype(np.int32)
    start, end = place[model.rstart[own]], place[model.rend[own]]
    live = start < end
    own, start, end = own[live], start[live], end[live]
    cap = (model.cap - load)[active]
    lift(start, end, model.roff, model.usage, model.rnode, own, choice, cap)
    # A cap may fall below zero by rounding only: the present states fit.
    return Model(
        off, cost, eu, ev, eoff, mat, number[model.rnode[own]], start, end, model.roff[own], model.usage,
        np.maximum(cap, 0.0), model.when[active],
    )  # fmt: skip


@kernel
def lift(start, end, roff, usage, rnode, own, choice, cap):
    """Adds back to the caps what the window's nodes use now."""
    for i in range(len(own)):
        used = usage[roff[own[i]] + choice[rnode[own[i]]]]
        if used != 0.0:
            for t in range(start[i], end[i]):
                cap[t] += used


@kernel
def window_costs(off, cost, links, nodes, number, choice, new_off, new_cost):
    """Costs of the window's states with the outer neighbours fixed; also counts its inner edges and their entries."""
    edges, entries = 0, np.int64(0)
    for i in range(len(nodes)):
        u = nodes[i]
        k = off[u + 1] - off[u]
        for s in range(k):
            new_cost[new_off[i] + s] = cost[off[u] + s]
        for h in range(links.hoff[u], links.hoff[u + 1]):
            v = links.far[h]
            if number[v] < 0:
                line = links.plane[links.back[h]] + choice[v] * k
                for s in range(k):
                    new_cost[new_off[i] + s] += links.mats[line + s]
            elif v > u:
                edges += 1
                entries += k * (off[v + 1] - off[v])
    return edges, entries


@kernel
def window_edges(off, links, nodes, number, eu, ev, eoff, mat):
    """Copies the window's inner edges."""
    e, place = 0, np.int64(0)
    for i in range(len(nodes)):
        u = nodes[i]
        for h in range(links.hoff[u], links.hoff[u + 1]):
            v = links.far[h]
            if v > u and number[v] >= 0:
                size = (off[u + 1] - off[u]) * (off[v + 1] - off[v])
                eu[e], ev[e], eoff[e] = i, number[v], place
                mat[place : place + size] = links.mats[links.plane[h] : links.plane[h] + size]
                place += size
                e += 1


@kernel(interpretable=False)
def grow_window(hoff, far, start, most_nodes, most_states, off, seed):
    """A random connected set of nodes around a start, within a number of nodes and of states."""
    np.random.seed(seed)
    inside = np.zeros(len(hoff) - 1, dtype=np.bool_)
    members = np.empty(most_nodes, dtype=np.int64)
    rim = np.empty(len(far) + 1, dtype=np.int64)
    rim[0] = start
    waiting, count, states = 1, 0, 0
    while waiting > 0 and count < most_nodes:
        # Half the time the oldest in the rim (round windows), else any (long ones).
        pick = 0 if np.random.random() < 0.5 else np.random.randint(waiting)
        u = rim[pick]
        waiting -= 1
        rim[pick] = rim[waiting]
        size = off[u + 1] - off[u]
        if inside[u] or (count > 0 and states + size > most_states):
            continue
        inside[u] = True
        members[count] = u
        count += 1
        states += size
        for h in range(hoff[u], hoff[u + 1]):
            if not inside[far[h]] and waiting < len(rim):
                rim[waiting] = far[h]
                waiting += 1
    return np.sort(members[:count])
