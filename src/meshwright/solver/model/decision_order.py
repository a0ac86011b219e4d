"""A decision order for the nodes of a small model in which few decided nodes have undecided neighbours."""

import numpy as np

from meshwright.jit import kernel
from meshwright.solver.model.half_edges import half_edges
from meshwright.solver.model.model import Model


def decision_order(model: Model) -> np.ndarray:
    """Nodes in the order of decision: the next one is always that which leaves the smallest frontier."""
    ends = half_edges(model)
    weight = np.log(np.diff(model.off) + 0.5)
    orders = [greedy_order(ends.hoff, ends.far, weight, start) for start in _starts(ends.hoff, weight)]
    return min(orders, key=lambda found: found[1])[0]


def permuted(model: Model, order: np.ndarray) -> Model:
    """The model with its nodes renumbered: new node i is old node order[i]."""
    sizes = np.diff(model.off)
    number = np.empty(len(order), dtype=np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    off = np.concatenate([[0], np.cumsum(sizes[order])]).astype(np.int64)
    pick = np.repeat(model.off[:-1][order] - off[:-1], sizes[order]) + np.arange(off[-1])
    return model._replace(
        off=off, cost=model.cost[pick], eu=number[model.eu], ev=number[model.ev], rnode=number[model.rnode]
    )


def _starts(hoff: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """A few nodes to begin with: the first, the last, and some with few neighbours."""
    degree = np.diff(hoff)
    light = np.argsort(degree + 1e-3 * weight, kind="stable")[:6]
    return np.unique(np.concatenate([[0, len(weight) - 1], light]))


@kernel
def greedy_order(hoff, far, weight, start):
    """Grows the order from one node; also returns the largest frontier met, as the log of its number of states."""
    num_nodes = len(weight)
    order = np.empty(num_nodes, dtype=np.int64)
    decided = np.zeros(num_nodes, dtype=np.bool_)
    near = np.zeros(num_nodes, dtype=np.bool_)  # undecided with a decided neighbour
    open_ends = np.zeros(num_nodes, dtype=np.int64)  # undecided neighbours of every node
    for u in range(num_nodes):
        open_ends[u] = hoff[u + 1] - hoff[u]
    frontier, worst = 0.0, 0.0
    for i in range(num_nodes):
        best, least = -1, np.inf
        for u in range(num_nodes):
            if decided[u] or (i > 0 and not near[u]):
                continue
            change = weight[u] if open_ends[u] > 0 else 0.0
            for h in range(hoff[u], hoff[u + 1]):
                if decided[far[h]] and open_ends[far[h]] == 1:
                    change -= weight[far[h]]
            if i == 0:
                change = 0.0 if u == start else 1.0
            if change < least:
                best, least = u, change
        if best < 0:  # a new component
            for u in range(num_nodes):
                if not decided[u]:
                    best = u
                    break
        order[i] = best
        decided[best], near[best] = True, False
        if open_ends[best] > 0:
            frontier += weight[best]
        for h in range(hoff[best], hoff[best + 1]):
            v = far[h]
            open_ends[v] -= 1
            if decided[v]:
                if open_ends[v] == 0:
                    frontier -= weight[v]
            else:
                near[v] = True
        worst = max(worst, frontier)
    return order, worst
