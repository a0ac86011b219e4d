"""Certifies a folded plan: a lower bound on the problem with nothing tied, started from the folded problem's dual.

Layers repeat, so the messages of one class of edges serve all its copies: spread evenly over the unfolded edges they
are almost optimal there, and a few sweeps repair the ends of the chain. Any messages give a valid bound.
"""

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.formulate import Formulation
from meshwright.solver import ChoiceProblem
from meshwright.solver.dual import Dual
from meshwright.solver.model import Model, from_problem

_FOLDED_SWEEPS = 60
_WORK = 500_000_000  # matrix entries read on the unfolded problem, within these numbers of sweeps
_SWEEPS = (4, 300)
_CLOSE = 1e-4  # of the target: closer is not worth the time


def unfolded_bound(formulation: Formulation, target: float) -> float:
    """No choice on this mesh costs less, tied or not, whatever the memory.

    Args:
        formulation: The folded problem.
        target: A cost that the bound cannot exceed by much: the sweeps stop when it is close.
    """
    keys = [key for key in formulation.edges if key[0] != key[2]]
    messages = _folded_messages(formulation, keys)
    ends, edge_keys = formulation.unfolded_edges()
    folded = formulation.folded
    costs = [formulation.costs[c] for c in (*folded.group_class, *folded.shared_class)]
    edges = [(u, v, formulation.edges[key][1]) for (u, v), key in zip(ends, edge_keys, strict=True)]
    dual = Dual(from_problem(ChoiceProblem.from_rows(costs, edges, [], None)))
    starts = _message_starts(dual)
    for edge, key in enumerate(edge_keys):
        for side, message in enumerate(messages.get(key, ())):
            start = starts[side, edge]
            dual.m[start : start + len(message)] = message
    work = sum(formulation.edges[key][1].size for key in edge_keys)
    dual.converge(int(np.clip(_WORK // max(work, 1), *_SWEEPS)), goal=target * (1 - _CLOSE))
    # Sums of thousands of floats may round upwards: give away more than they can.
    return dual.bound - 1e-12 * abs(dual.bound)


def _folded_messages(
    formulation: Formulation, keys: list[tuple[int, int, int, int]]
) -> dict[tuple[int, int, int, int], tuple[NDArray, NDArray]]:
    """For each class of edges, one copy's share of the messages to its two ends."""
    costs = [n * cost for n, cost in zip(formulation.copies, formulation.costs, strict=True)]
    edges = [(key[0], key[2], formulation.edges[key][0] * formulation.edges[key][1]) for key in keys]
    dual = Dual(from_problem(ChoiceProblem.from_rows(costs, edges, [], None)))
    dual.converge(_FOLDED_SWEEPS, 1e-7)
    dual.restore()
    starts = _message_starts(dual)
    found = {}
    for edge, key in enumerate(keys):
        count = formulation.edges[key][0]
        first, second = starts[:, edge]
        found[key] = (
            dual.m[first : first + len(costs[key[0]])] / count,
            dual.m[second : second + len(costs[key[2]])] / count,
        )
    return found


def _message_starts(dual: Dual) -> NDArray[np.int64]:
    """``[side, edge]``: where the message of an edge to its first or second node begins; see `solver.links.link`."""
    model: Model = dual.model
    own, far = np.concatenate([model.eu, model.ev]), np.concatenate([model.ev, model.eu])
    order = np.lexsort((far, own))
    starts = np.empty(len(order), np.int64)
    starts[order] = dual.links.msg
    return starts.reshape(2, -1)
