"""Layers that may alternate are split alike where that costs next to nothing."""

from dataclasses import replace

import numpy as np

import meshwright as mw
from meshwright.graph import trace
from meshwright.planner.grouping.folding import tied_throughout
from meshwright.planner.planner import Task
from meshwright.planner.solving.fit_memory import View, ViewState, solve_free
from meshwright.planner.solving.refining import alike
from meshwright.solver import price
from tests.planner.examples import mesh, mlp_step


def solved():
    """A view of six layers, solved, and the kind of layers' groups that each class belongs to."""
    step, args = mlp_step(256, 32, 6)
    formulation = Task(trace(step, *args), mw.Auto()).formulate(mesh((4,)))
    whole = tied_throughout(formulation.grouping, formulation.folded)
    kinds = [whole.group_class[members[0]] for members in formulation.folded.members]
    return solve_free(ViewState(View(formulation, None))), kinds


def test_what_alternates_is_split_alike():
    state, kinds = solved()
    formulation, best = state.formulation, state.latest
    problem = formulation.problem({}, None)
    assert len(set(kinds)) < len(kinds)
    changed = 0
    for one, kind in enumerate(kinds):
        other = next((n for n in range(one) if kinds[n] == kind), None)
        if other is None or len(formulation.costs[one]) < 2 or best.choice[one] != best.choice[other]:
            continue
        choice = best.choice.copy()
        choice[one] = (choice[one] + 1) % len(formulation.costs[one])
        cost = price(problem, choice).cost
        if not best.cost < cost < np.inf:
            continue
        apart = replace(best, choice=choice, cost=cost)
        found = alike(replace(state, latest=apart, fitted=apart)).latest
        assert found.choice[one] == found.choice[other] and found.cost <= cost
        assert found.cost == price(problem, found.choice).cost
        changed += 1
    assert changed


def test_what_is_alike_or_worth_its_price_stays():
    state, _ = solved()
    found = alike(state)
    assert found is state or found.latest.cost <= 1.005 * state.latest.cost
    assert alike(found) is found
