"""The time of planning: one clock that every phase reads, and plans that come with their gaps when it is over."""

import numpy as np
import pytest

import meshwright as mw
from meshwright.graph import trace
from meshwright.planner.budget import Budget
from meshwright.planner.planner import Task
from meshwright.planner.solving.fit_memory import View, ViewState
from meshwright.planner.solving.solves import least_memory
from meshwright.solver.run import Run
from tests.planner.examples import mesh, mlp_step


class Clock:
    """Tells the time, which goes by only here."""

    def __init__(self, step=0.0):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


def test_given_seconds_hold_from_the_beginning():
    clock = Clock()
    budget = Budget(10.0, clock)
    assert (budget.left, budget.is_over, budget.is_for_solving) == (10.0, False, False)
    clock.now = 6.0
    budget.hold_memory(100.0)  # changes nothing
    assert (budget.left, budget.is_for_solving, budget.of_one_solve(20.0), budget.of_one_solve(3.0)) == (4, True, 4, 3)
    assert budget.part(0.5).left == 2.0
    clock.now = 11.0
    assert budget.is_over and 0.0 < budget.of_one_solve(20.0) < 1.0  # enough for a choice


def test_without_given_seconds_only_memory_is_limited_by_what_came_before():
    clock = Clock()
    short, long = Budget(None, clock), Budget(None, clock)
    clock.now = 1e6
    assert short.left == long.left == np.inf and not short.is_for_solving
    short.hold_memory(0.1)
    long.hold_memory(100.0)
    assert short.left < 10.0 < 100.0 < long.left < 1000.0
    clock.now += short.left
    assert short.is_over and not long.is_over


@pytest.mark.parametrize("seconds", [0, -1.0, "ten"])
def test_seconds_that_are_none_are_refused(seconds):
    with pytest.raises(mw.ShardingError, match="seconds is"):
        mw.Auto(seconds=seconds)


@pytest.fixture(scope="module")
def task():
    step, args = mlp_step(32, 16, layers=8)
    return Task(trace(step, *args), mw.Auto())


@pytest.fixture(scope="module")
def tight(task):
    formulation = task.formulate(mesh((2, 2)))
    free, (_, least) = ViewState(View(formulation, None)).step(), least_memory(formulation)
    return int(least + 0.1 * (free.peak_bytes - least))


@pytest.fixture
def solves(monkeypatch):
    """Counts the solves that are asked for, and the seconds that they are given."""
    found, solve = [], Run.solve

    def counted(run, seconds, *options):
        found.append(seconds)
        return solve(run, seconds, *options)

    monkeypatch.setattr(Run, "solve", counted)
    return found


@pytest.mark.slow
def test_toys_in_tight_memory_take_few_solves_and_little_time(task, tight, solves):
    plan = task.plan([mesh((2, 2), memory_bytes=tight)], lambda _: None)
    assert plan.memory.peak_bytes <= tight
    assert len(solves) < 20 and sum(s for s in solves if s < 20.0) < 10.0  # those without memory end at once
    assert 0.0 < plan.solution.lower_bound <= plan.cost.total


def test_when_the_time_is_over_there_is_a_plan_with_its_gap(task, tight, solves):
    budget = Budget(1.0, Clock(step=1.0))
    plan = task.plan([mesh((2, 2), memory_bytes=tight)], lambda _: None, budget)
    assert plan.memory.peak_bytes <= tight
    assert len(solves) < 10
    solution = plan.solution
    assert solution.status == "feasible" and solution.gap > 0.0
    assert 0.0 <= solution.lower_bound < plan.cost.total


def test_views_for_which_there_is_no_time_are_not_priced(task, monkeypatch):
    priced, formulate = [], task.formulate
    monkeypatch.setattr(task, "formulate", lambda mesh, *rest: priced.append(mesh.sizes) or formulate(mesh, *rest))
    meshes = [mesh(shape) for shape in ((4,), (2, 2), (4, 1))]
    plan = task.plan(meshes, lambda _: None, Budget(1.0, Clock(step=1.0)))
    assert priced == [(4,)] and plan.mesh.sizes == (4,)
    assert [one.remark for one in plan.considered] == ["", "not tried in 1 s", "not tried in 1 s"]


def test_programs_of_one_call_have_time_of_their_own_unless_seconds_are_given():
    """With what the first program left, a second one would be searched in haste."""
    clock = Clock()
    budget = Budget(None, clock)
    budget.hold_memory(1.0)
    clock.now = 1e6
    assert budget.is_over and budget.of_another_program().left == np.inf
    limited = Budget(10.0, Clock())
    assert limited.of_another_program() is limited
