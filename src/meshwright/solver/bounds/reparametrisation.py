"""Moves the messages of a dual into the costs of its model, so that what follows starts from them."""

import numpy as np

from meshwright.jit import kernel
from meshwright.solver.bounds.dual import Dual
from meshwright.solver.model.model import Model


def reparametrised(dual: Dual) -> Model:
    """The dual's model with its messages moved into the costs: no total changes, and zero messages are as good."""
    model = dual.model
    sizes = np.diff(model.off)
    eoff = np.concatenate([[0], np.cumsum(sizes[model.eu] * sizes[model.ev])])
    cost, mat = model.cost.copy(), np.empty(eoff[-1])
    move_messages(model.off, model.eu, model.ev, model.eoff, model.mat, dual.links.of_edge, dual.m, cost, mat)
    return model._replace(cost=cost, mat=mat, eoff=eoff[:-1])


@kernel
def move_messages(off, eu, ev, eoff, mat, of_edge, m, new_cost, new_mat):
    """Moves the messages of every edge to its nodes' costs and out of its matrix."""
    place = 0
    for e in range(len(eu)):
        u, v = eu[e], ev[e]
        here, there = of_edge[0, e], of_edge[1, e]
        num_there = off[v + 1] - off[v]
        for s in range(off[u + 1] - off[u]):
            new_cost[off[u] + s] += m[here + s]
            for t in range(num_there):
                new_mat[place] = mat[eoff[e] + s * num_there + t] - m[here + s] - m[there + t]
                place += 1
        for t in range(num_there):
            new_cost[off[v] + t] += m[there + t]
