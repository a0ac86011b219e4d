"""Plans of named methods as choices to start from, where memory is tight.

A named method is the same problem with most strategies ruled out: soon solved, and what it finds is a choice of the
whole problem. The search starts from the best of them, so that it is not worse than a named method on the same views,
however little time is left for the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from meshwright.errors import ShardingError
from meshwright.graph import Graph
from meshwright.planner.budget import Budget
from meshwright.planner.grouping.roles import Roles
from meshwright.planner.methods import NAMED, Method
from meshwright.planner.reading.readback import MeshProblem
from meshwright.planner.solving.fit_memory import Stage, View, ViewState, solve_free
from meshwright.solver.problem.solution import Status
from meshwright.strategy.sharding import Axes

Restricted = Callable[[Method, MeshProblem], MeshProblem | None]


def restricted(method: Method, problem: MeshProblem, graph: Graph, roles: Roles) -> MeshProblem | None:
    """A problem as a named method restricts it; None where it has no plan on this mesh."""
    try:
        to = method.restrict(graph, roles, problem.mesh, Axes(problem.mesh.sizes))
    except ShardingError:  # the batch does not divide among the axes that it takes
        return None
    return problem.restricted(to)


def with_starts(states: Sequence[ViewState], named: Restricted, budget: Budget) -> list[ViewState]:
    """Views, each with a choice of a named method that fits, where it is cheaper than all that fit before.

    A method is solved on its own view, as it would be alone: other views start from what is found there. Where its own
    view is not among them it is solved on each, up to the first choice that fits.

    Args:
        states: Views that were solved without memory.
        named: A view's problem as a named method restricts it.
        budget: The time for it.
    """
    found = list(states)
    best = min((state.cost for state in states if state.fits), default=np.inf)
    open_views = [number for number, state in enumerate(states) if not _is_settled(state)]
    rows = [(method, [n for n, state in enumerate(states) if _is_own(method, state)]) for method in NAMED]
    pairs = [(method, n, bool(own)) for method, own in rows for n in open_views if not own or n in own]
    for method, number, is_own in sorted(pairs, key=lambda pair: not pair[2]):
        state, started = found[number], budget.now
        problem = named(method, state.formulation) if is_own or not budget.is_over else None
        if problem is None:
            continue
        last = Stage.DONE if is_own else Stage.NEAR
        start = _solved(replace(state.view, formulation=problem), best, last, budget)
        if start is not None and start.fitted is not None and start.cost < best:
            # Where memory was short for the method it is short for others, too: so their first answers mostly fit.
            best, state = start.cost, replace(state, fitted=start.fitted, moments=start.moments)
        found[number] = replace(state, seconds=state.seconds + budget.now - started)
    return found


def _is_settled(state: ViewState) -> bool:
    """Whether nothing on a view is better than its best choice without memory, which fits."""
    return state.fits and state.latest is not None and state.latest.status is Status.OPTIMAL


def _is_own(method: Method, state: ViewState) -> bool:
    """Whether a view is the one that a method takes where it is alone."""
    mesh = state.formulation.mesh
    return mesh.cluster is None or mesh.sizes in [own.sizes for own in method.meshes(mesh.cluster)]


def _solved(view: View, goal: float, last: Stage, budget: Budget) -> ViewState | None:
    """A restricted view as far as a stage, without memory even if the time is over; None where nothing fits."""
    if view.limit is not None and view.formulation.memory.least(view.formulation.costs).peak_bytes > view.limit:
        return None
    state = solve_free(ViewState(view), budget)
    while state.floor < goal and not (state.is_done or state.has_failed or state.stage is last or budget.is_over):
        state = state.advance(goal, budget)
    return state if state.fitted is not None else None
