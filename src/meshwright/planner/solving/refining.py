"""Proves how good a view's choice is; where ties between layers leave a gap in a small problem, solves it untied.

Folding keeps problems of deep models small, and plans regular. In tight memory it may cost much: what tied layers hold
comes in lumps. A small problem is soon solved with nothing tied.
"""

import numpy as np

from meshwright.planner.budget import Budget
from meshwright.planner.grouping.folding import unfolded
from meshwright.planner.reading.readback import MeshProblem
from meshwright.planner.solving.certificate import certified
from meshwright.planner.solving.fit_memory import View
from meshwright.plans.plan import PROVEN_GAP
from meshwright.solver.problem.gap import relative_gap


def proven(view: View, limit: float | None, budget: Budget) -> tuple[View, float]:
    """The view, or the same with nothing tied where that has a better choice; and what no plan costs less than.

    Args:
        view: The best view of a search, with its choice.
        limit: Bytes that a plan may take on each device, with which the view may have been solved or with fewer.
        budget: The time for it.
    """
    bound = certified(view, limit, budget.deadline)
    if relative_gap(view.cost, bound) <= PROVEN_GAP or not _may_gain(view, budget):
        return view, bound
    apart = untied(view, budget)
    if apart is None:
        return view, bound
    bound = max(bound, certified(apart, limit, budget.deadline))
    is_regular = relative_gap(view.cost, bound) <= PROVEN_GAP or view.cost <= apart.cost
    return (view if is_regular else apart), bound


def _may_gain(view: View, budget: Budget) -> bool:
    """Whether anything is tied in a problem that is small without ties."""
    formulation = view.formulation
    size = sum(n * len(cost) for n, cost in zip(formulation.copies, formulation.costs, strict=True))
    is_small = size * formulation.memory.num_steps <= view.tuning.small
    return max(formulation.copies) > 1 and is_small and not budget.is_over


def untied(view: View, budget: Budget) -> View | None:
    """A view solved again with nothing tied, from its choice; None where that found no choice."""
    tied: MeshProblem = view.formulation
    folded = unfolded(tied.grouping, tied.folded)
    formulation = MeshProblem(tied.pricer, folded, tied.live, tied.restrictions)
    classes = np.array([*tied.folded.group_class, *tied.folded.shared_class], np.int64)
    assert view.solution is not None and view.solution.choice is not None
    found = View(formulation, view.limit, budget=budget, initial=view.solution.choice[classes])
    found.seconds, found.rounds = view.seconds, list(view.rounds)
    if not found.step():
        return None
    found.floor, found.free = found.cost, found.solution
    while not found.done:
        if not found.advance():
            return None
    return found
