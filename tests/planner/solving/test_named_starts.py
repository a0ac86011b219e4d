"""Named methods are choices to start from: however little time there is, `Auto` is not worse than they are."""

import numpy as np
import pytest

import meshwright as mw
from meshwright.graph import trace
from meshwright.planner.budget import Budget
from meshwright.planner.methods import NAMED
from meshwright.planner.planner import Task
from meshwright.planner.solving.fit_memory import View, ViewState
from tests.planner.examples import mesh, mlp_step, solve_on

STEP = mlp_step(64, 64, layers=2)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_auto_is_not_worse_than_a_named_method_without_time(shape):
    traced = trace(*STEP[:1], *STEP[1])
    for method in NAMED:
        free = solve_on(traced, method, [mesh(shape)])
        where = [mesh(shape, memory_bytes=free.memory.peak_bytes)]
        auto = Task(traced, mw.Auto()).plan(where, lambda _: None, Budget(1e-9))
        assert auto.memory.peak_bytes <= free.memory.peak_bytes
        assert auto.cost.total <= free.cost.total * (1 + 1e-9), method.name


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_what_a_named_method_leaves_is_priced_as_its_own_problem_is(shape):
    """Numbered alike, the same strategies are left, so that what it finds costs the same in both problems."""
    traced = trace(*STEP[:1], *STEP[1])
    whole = Task(traced, mw.Auto()).formulate(mesh(shape))
    for method in NAMED:
        task = Task(traced, method)
        part = Task(traced, mw.Auto()).named(method, whole)
        assert part is not None and [len(cost) for cost in part.costs] == [len(cost) for cost in whole.costs]
        alone = ViewState(View(task.formulate(mesh(shape)), None)).step()
        found = ViewState(View(part, None)).step()
        assert found.cost == pytest.approx(alone.cost), method.name
        assert np.isfinite(whole.problem({}, None).cost).all()  # the whole problem is left as it was
        least = part.memory.least(part.costs).peak_bytes
        assert whole.memory.least().peak_bytes <= least <= found.peak_bytes


def test_a_wide_gap_says_what_keeps_the_plan_from_being_better():
    traced = trace(*STEP[:1], *STEP[1])
    free = solve_on(traced, mw.Zero(3), [mesh((4,))])
    limit = free.memory.peak_bytes
    plan = Task(traced, mw.Auto()).plan([mesh((4,), memory_bytes=limit)], lambda _: None, Budget(1e-9))
    assert plan.solution.gap > 0.2
    (remark,) = (text for text in plan.remarks if "more than the best" in text)
    assert f"may cost {plan.solution.gap:.0%} more than the best on mesh 4: the memory limit binds" in remark
    assert "and the time of the search was over." in remark and "With microbatches=" in remark
    assert "more seconds" in remark
    assert not any("more than the best" in text for text in free.remarks)
