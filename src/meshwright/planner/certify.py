"""Certifies a folded plan: a lower bound on the problem with nothing tied, started from the folded problem's dual.

Layers repeat, so the messages of one class of edges serve all its copies: spread evenly over the unfolded edges they
are almost optimal there, and a few sweeps repair the ends of the chain. Any messages give a valid bound.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from meshwright.planner.formulate import Formulation
from meshwright.solver import ChoiceProblem, gather
from meshwright.solver.dual import Dual
from meshwright.solver.model import from_problem

_FOLDED_SWEEPS = 60
_WORK = 500_000_000  # matrix entries read on the unfolded problem, within these numbers of sweeps
_SWEEPS = (4, 300)
_CLOSE = 1e-4  # of the target: closer is not worth the time

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


def unfolded_bound(formulation: Formulation, target: float) -> float:
    """No choice on this mesh costs less, tied or not, whatever the memory.

    Args:
        formulation: The folded problem.
        target: A cost that the bound cannot exceed by much: the sweeps stop when it is close.
    """
    which = formulation.folded.untied.which
    dual = Dual(from_problem(_unfolded(formulation)))
    for messages, starts in zip(_folded_messages(formulation), dual.links.of_edge, strict=True):
        _spread(*_pool(messages), which, starts, dual.m)
    work = sum(count * matrix.size for count, matrix in formulation.edges.values())
    dual.converge(int(np.clip(_WORK // max(work, 1), *_SWEEPS)), goal=target * (1 - _CLOSE))
    # Sums of thousands of floats may round upwards: give away more than they can.
    return dual.bound - 1e-12 * abs(dual.bound)


def _unfolded(formulation: Formulation) -> ChoiceProblem:
    """The problem with nothing tied and no memory: its nodes are the groups, then the shared readings."""
    folded = formulation.folded
    classes = np.array([*folded.group_class, *folded.shared_class], np.int64)
    first, cost = _pool(formulation.costs)
    size = np.diff(first)[classes]
    matrix_first, matrix = _pool([matrix.ravel() for _, matrix in formulation.edges.values()])
    nodes = np.stack([folded.untied.source, folded.untied.reader], axis=1).astype(np.int32)
    edges = gather.Edges(nodes, folded.untied.which.astype(np.int32), matrix_first, matrix)
    costs = cost[_ranges(first[classes], size)]
    return ChoiceProblem.from_arrays(_starts(size), costs, edges, gather.no_rows(), np.inf)


def _folded_messages(formulation: Formulation) -> tuple[list[Array], list[Array]]:
    """For each class of edges one copy's share of the message to its first end, and to its second.

    They are empty where both ends are tied.
    """
    costs = [n * cost for n, cost in zip(formulation.copies, formulation.costs, strict=True)]
    keys = [key for key in formulation.edges if key[0] != key[2]]
    edges = [(key[0], key[2], formulation.edges[key][0] * formulation.edges[key][1]) for key in keys]
    dual = Dual(from_problem(ChoiceProblem.from_rows(costs, edges, [], None)))
    dual.converge(_FOLDED_SWEEPS, 1e-7)
    dual.restore()
    starts = dict(zip(keys, dual.links.of_edge.T.tolist(), strict=True))
    found: tuple[list[Array], list[Array]] = ([], [])
    for key, (count, _) in formulation.edges.items():
        for messages, node, start in zip(found, (key[0], key[2]), starts.get(key, (0, 0)), strict=True):
            size = len(costs[node]) if key in starts else 0
            messages.append(dual.m[start : start + size] / count)
    return found


@njit(cache=True)
def _spread(first, messages, which, starts, target):
    """Writes the message of each edge's class where the edge's own begins."""
    for edge in range(len(which)):
        begin = first[which[edge]]
        for i in range(begin, first[which[edge] + 1]):
            target[starts[edge] + i - begin] = messages[i]


def _pool(arrays: list[Array]) -> tuple[Ints, Array]:
    """Arrays one after another, and where each begins."""
    return _starts(np.array([len(a) for a in arrays], np.int64)), np.concatenate(arrays) if arrays else np.zeros(0)


def _starts(sizes: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)])


def _ranges(first: Ints, size: Ints) -> Ints:
    """The whole numbers from each `first` on, `size` of them each."""
    return np.repeat(first - _starts(size)[:-1], size) + np.arange(size.sum())
