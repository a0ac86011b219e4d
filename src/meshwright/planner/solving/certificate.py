"""Certifies a folded plan: a lower bound on the problem with nothing tied, started from the folded problem's dual.

Layers repeat, so the messages of one class of edges serve all its copies: spread evenly over the unfolded edges they
are almost optimal there, and a few sweeps repair the ends of the chain. Any messages give a valid bound, and so do any
prices of memory at any moments: what fits the limit costs no less than what it costs and takes at these prices, less
the price of the limit itself.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from meshwright.arrays import Floats, Ints
from meshwright.jit import kernel
from meshwright.planner.grouping.numbering import ranges, starts
from meshwright.planner.pricing.formulation import Formulation
from meshwright.planner.solving.fit_memory import ViewState
from meshwright.solver import ChoiceProblem
from meshwright.solver.bounds.dual import Dual, ascend_prices
from meshwright.solver.deadline import NEVER, Deadline
from meshwright.solver.model.model import from_problem
from meshwright.solver.problem import validate
from meshwright.solver.problem.copies import EdgeKey
from meshwright.solver.tuning import TUNING

_WORK = 500_000_000  # matrix entries that sweeps of the unfolded problem read
_CLOSE = 10.0 * TUNING.price_gain  # of the target: closer is not worth the time, as in the first sweeps of a solve


class Held(NamedTuple):
    """Memory that a choice may take at some moments, and what a byte is worth there, as far as that is known."""

    times: Sequence[int]
    limit: float
    worth: Mapping[int, float] = MappingProxyType({})


def certified(state: ViewState, limit: float | None, deadline: Deadline = NEVER) -> float:
    """What no plan that fits a limit costs less than on a view's mesh, as far as its formulation allows it."""
    formulation, free = state.formulation, state.free
    assert free is not None
    is_held = limit is not None and bool(state.moments.reserved)
    bounds = [0.0]
    if max(formulation.copies) == 1:  # nothing is tied: what solves prove holds for every plan
        bounds += [free.lower_bound, state.proven if is_held and state.view.limit == limit else 0.0]
    if is_held and max(bounds) < state.cost:
        assert limit is not None
        held = Held(sorted(state.moments.reserved), limit, state.worth)
        bounds.append(unfolded_bound(formulation, state.cost, held, deadline))
    if max(bounds) < free.lower_bound:  # memory was not held, or its prices say little
        bounds.append(unfolded_bound(formulation, free.cost, deadline=deadline))
    return max(bounds)


def unfolded_bound(
    formulation: Formulation, target: float, held: Held | None = None, deadline: Deadline = NEVER
) -> float:
    """No choice on this mesh costs less, tied or not; without `held`, whatever the memory.

    Args:
        formulation: The folded problem.
        target: A cost that the bound cannot exceed by much: the sweeps stop when it is close.
        held: Where memory is short; copies that resharding makes are not counted.
        deadline: When to stop: bounds hold whenever that is.
    """
    which = formulation.folded.untied.which
    folded, keys, prices = _folded(formulation, target, held, deadline)
    spare = float(folded.price @ folded.model.cap)
    dual = Dual(from_problem(_unfolded(formulation, prices)))
    for messages, begin in zip(_messages(formulation, folded, keys), dual.links.of_edge, strict=True):
        _spread(*_pool(messages), which, begin, dual.m)
    work = sum(count * matrix.size for count, matrix in formulation.edges.values())
    reach = (target if held is None else folded.bound) * (1 - _CLOSE) + spare
    before = -np.inf  # `Dual.converge` looks at ten sweeps at a time, which here take as long as all the rest
    for _ in range(1 + _WORK // max(work, 1)):
        bound = dual.sweep()
        if bound >= reach or bound - before <= TUNING.price_gain * abs(bound) or deadline.is_over:
            break
        before = bound
    # Sums of thousands of floats may round upwards: give away more than they can.
    return dual.bound - spare - 1e-12 * abs(dual.bound)


def _unfolded(formulation: Formulation, prices: dict[int, float]) -> ChoiceProblem:
    """The problem with nothing tied and memory at a price: its nodes are the groups, then the shared readings."""
    folded = formulation.folded
    classes = np.array([*folded.group_class, *folded.shared_class], np.int64)
    first, cost = _pool(formulation.costs)
    size = np.diff(first)[classes]
    matrix_first, matrix = _pool([matrix.ravel() for _, matrix in formulation.edges.values()])
    nodes = np.stack([folded.untied.source, folded.untied.reader], axis=1).astype(np.int32)
    edges = validate.Edges(nodes, folded.untied.which.astype(np.int32), matrix_first, matrix)
    costs, begin = cost[ranges(first[classes], size)], starts(size)
    if prices:
        formulation.memory.charge(prices, costs, begin)
    return ChoiceProblem.from_arrays(begin, costs, edges, validate.no_rows(), np.inf)


def _folded(
    formulation: Formulation, target: float, held: Held | None, deadline: Deadline
) -> tuple[Dual, list[EdgeKey], dict[int, float]]:
    """The dual of the folded problem, its edges, which are all whose ends are not tied, and its prices of memory."""
    costs = [n * cost for n, cost in zip(formulation.copies, formulation.costs, strict=True)]
    keys = [key for key in formulation.edges if key[0] != key[2]]
    edges = [(key[0], key[2], formulation.edges[key][0] * formulation.edges[key][1]) for key in keys]
    rows: list[tuple[int, int, int, Floats]] = []
    times: list[int] = []
    for time in held.times if held is not None else ():
        usage, at = formulation.memory.usage(time, len(costs)), len(times)
        taken = [(which, at, at + 1, size) for which, size in enumerate(usage) if size is not None]
        if taken:
            rows += taken
            times.append(time)
    problem = ChoiceProblem.from_rows(costs, edges, rows, held.limit if held is not None else None)
    known = np.array([held.worth.get(time, 0.0) for time in times]) if held is not None else None
    dual = Dual(from_problem(problem), prices=known)
    dual.converge(TUNING.price_sweeps, _CLOSE, deadline)
    if held is not None and not held.worth:
        ascend_prices(dual, target, TUNING.price_sweeps, deadline)
    return dual, keys, dict(zip(times, dual.price.tolist(), strict=True))


def _messages(formulation: Formulation, dual: Dual, keys: list[EdgeKey]) -> tuple[list[Floats], list[Floats]]:
    """For each class of edges one copy's share of the message to its first end, and to its second.

    They are empty where both ends are tied.
    """
    sizes = np.diff(dual.model.off).tolist()
    begin = dict(zip(keys, dual.links.of_edge.T.tolist(), strict=True))
    found: tuple[list[Floats], list[Floats]] = ([], [])
    for key, (count, _) in formulation.edges.items():
        for messages, node, start in zip(found, (key[0], key[2]), begin.get(key, (0, 0)), strict=True):
            size = sizes[node] if key in begin else 0
            messages.append(dual.m[start : start + size] / count)
    return found


@kernel
def _spread(first, messages, which, starts, target):
    """Writes the message of each edge's class where the edge's own begins."""
    for edge in range(len(which)):
        begin = first[which[edge]]
        for i in range(begin, first[which[edge] + 1]):
            target[starts[edge] + i - begin] = messages[i]


def _pool(arrays: list[Floats]) -> tuple[Ints, Floats]:
    """Arrays one after another, and where each begins."""
    return starts(np.array([len(a) for a in arrays], np.int64)), np.concatenate(arrays) if arrays else np.zeros(0)
