"""Proves how good a view's choice is; where ties between layers leave a gap in a small problem, solves it untied.

Folding keeps problems of deep models small, and plans regular. In tight memory it may cost much: what tied layers hold
comes in lumps. A small problem is soon solved with nothing tied. The other way round, layers that may alternate are
split alike where that costs next to nothing.
"""

from dataclasses import replace

import numpy as np

from meshwright.planner.budget import Budget
from meshwright.planner.grouping.folding import tied_throughout, unfolded
from meshwright.planner.pricing.formulation import Exposure
from meshwright.planner.reading.readback import MeshProblem
from meshwright.planner.solving.certificate import certified
from meshwright.planner.solving.fit_memory import LESS, View, ViewState, solve_free
from meshwright.plans.plan import PROVEN_GAP
from meshwright.solver import price
from meshwright.solver.problem.gap import relative_gap

#: Part of a step's costs that layers which are split apart must save: split alike they are easier to understand.
_WORTH = 0.005


def proven(state: ViewState, limit: float | None, budget: Budget) -> tuple[ViewState, float]:
    """The view, or the same with nothing tied where that has a better choice; and what no plan costs less than.

    Args:
        state: The best view of a search, with its choice.
        limit: Bytes that a plan may take on each device, with which the view may have been solved or with fewer.
        budget: The time for it.
    """
    bound = certified(state, limit, budget.deadline)
    if relative_gap(state.cost, bound) <= PROVEN_GAP or not _may_gain(state, budget):
        return alike(state), bound
    apart = untied(state, budget)
    if apart is None:
        return alike(state), bound
    bound = max(bound, certified(apart, limit, budget.deadline))
    is_regular = relative_gap(state.cost, bound) <= PROVEN_GAP or state.cost <= (1 + _WORTH) * apart.cost
    return (alike(state) if is_regular else apart), bound


def alike(state: ViewState) -> ViewState:
    """A view whose neighbouring layers are split alike, too, where that costs no more than layers apart must save.

    All layers take the choice of the first of those that alternate, or of the last.
    """
    formulation, solution = state.formulation, state.latest
    folded = formulation.folded
    assert solution is not None and solution.choice is not None
    whole = tied_throughout(formulation.grouping, folded)
    kind_of_group = np.array([*whole.group_class, *whole.shared_class], np.int64)
    groups, readings = [row[0] for row in folded.members], [row[0] for row in folded.shared_members]
    kind = kind_of_group[[*groups, *(len(folded.group_class) + reading for reading in readings)]]
    if len(kind) == kind.max(initial=-1) + 1:
        return state
    best, most = state, (1 + _WORTH) * solution.cost
    lengths = np.array([len(cost) for cost in formulation.costs])
    for order in (slice(None, None, -1), slice(None)):  # of several classes of a kind, the last that is written stays
        source = np.empty(len(kind), np.int64)
        source[kind[order]] = np.arange(len(kind))[order]
        source = source[kind]
        if (lengths[source] != lengths).any() or (solution.choice[source] == solution.choice).all():
            continue
        choice = solution.choice[source]
        cost = float(price(formulation.problem({}, None), choice).cost)
        _, peak = state.moments.tightened(formulation, choice, state.view.limit)
        found = replace(solution, choice=choice, cost=cost, peak_usage=peak)
        if cost <= most and state.view.fits(found):
            best, most = replace(state, latest=found, fitted=found), cost * LESS
    return best


def _may_gain(state: ViewState, budget: Budget) -> bool:
    """Whether anything is tied in a problem that is small without ties."""
    formulation = state.formulation
    size = sum(n * len(cost) for n, cost in zip(formulation.copies, formulation.costs, strict=True))
    is_small = size * formulation.memory.num_steps <= state.view.tuning.small
    return max(formulation.copies) > 1 and is_small and not budget.is_over


def untied(state: ViewState, budget: Budget) -> ViewState | None:
    """A view solved again with nothing tied, from its choice; None where that found no choice."""
    tied: MeshProblem = state.formulation
    folded = unfolded(tied.grouping, tied.folded)
    whole = MeshProblem(tied.pricer, folded, tied.live, tied.restrictions)
    formulation = whole if tied.exposure == Exposure() else whole.exposed(tied.exposure)
    classes = np.array([*tied.folded.group_class, *tied.folded.shared_class], np.int64)
    assert state.latest is not None and state.latest.choice is not None
    begun = ViewState(View(formulation, state.view.limit), state.latest.choice[classes])
    found = solve_free(replace(begun, seconds=state.seconds, rounds=state.rounds), budget)
    while not found.is_done and not found.has_failed:
        found = found.advance(budget=budget)
    return None if found.has_failed else found
