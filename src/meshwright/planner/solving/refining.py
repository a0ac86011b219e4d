"""Proves how good a view's choice is; where ties between layers leave a gap in a small problem, solves it untied.

Folding keeps problems of deep models small, and plans regular. In tight memory it may cost much: what tied layers hold
comes in lumps. A small problem is soon solved with nothing tied.
"""

from dataclasses import replace

import numpy as np

from meshwright.planner.budget import Budget
from meshwright.planner.grouping.folding import unfolded
from meshwright.planner.pricing.formulation import Exposure
from meshwright.planner.reading.readback import MeshProblem
from meshwright.planner.solving.certificate import certified
from meshwright.planner.solving.fit_memory import View, ViewState, solve_free
from meshwright.plans.plan import PROVEN_GAP
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
        return state, bound
    apart = untied(state, budget)
    if apart is None:
        return state, bound
    bound = max(bound, certified(apart, limit, budget.deadline))
    is_regular = relative_gap(state.cost, bound) <= PROVEN_GAP or state.cost <= (1 + _WORTH) * apart.cost
    return (state if is_regular else apart), bound


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
