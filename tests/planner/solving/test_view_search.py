"""Memory as a hard limit: kept, dearer as it tightens, and at the end said how much would do."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import meshwright as mw
from meshwright.graph import trace
from meshwright.planner.budget import Budget
from meshwright.planner.planner import Task
from meshwright.planner.solving import view_search as search_module
from meshwright.planner.solving.fit_memory import Stage, View, ViewState
from meshwright.planner.solving.solves import least_memory, solves
from meshwright.planner.solving.tuning import VIEW_TUNING, ViewTuning
from meshwright.solver.problem.solution import Solution, Status
from meshwright.solver.run import Run
from tests.planner.examples import mesh, mlp_step, traced_zoo

pytestmark = pytest.mark.slow


def planner_of(traced, shape):
    task = Task(traced, mw.Auto())

    def at(limit):
        return task.plan([mesh(shape, memory_bytes=None if limit is None else int(limit))], lambda _: None)

    return at


@pytest.mark.sweep(1)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_tighter_limit_is_kept_and_never_cheaper_until_nothing_fits(shape):
    step, args = mlp_step(64, 64)
    at = planner_of(trace(step, *args), shape)
    free = at(None)
    assert free.memory.limit_bytes is None
    peak, least, cost = free.memory.peak_bytes, 0, free.cost.total
    assert at(peak).cost.total == pytest.approx(cost)
    for share in (0.9, 0.8, 0.7, 0.6, 0.5, 0.3):
        try:
            plan = at(peak * share)
        except mw.DoesNotFit as error:
            assert error.limit_bytes == int(peak * share)
            assert error.needed_bytes > error.limit_bytes
            assert "more devices, a smaller batch, or devices with more memory" in str(error)
            least = error.needed_bytes
            break
        assert plan.memory.peak_bytes <= plan.memory.limit_bytes == int(peak * share)
        assert plan.cost.total >= cost * (1 - 1e-9)
        cost = plan.solution.lower_bound  # what is not proven in time may be beaten even with less memory
    assert least
    fitted = at(least * 1.001)
    assert fitted.memory.peak_bytes <= least * 1.001
    assert fitted.cost.total >= cost * (1 - 1e-9)


def test_arguments_alone_may_be_too_much():
    step, args = mlp_step(64, 64)
    with pytest.raises(mw.DoesNotFit) as caught:
        planner_of(trace(step, *args), (4,))(1000)
    assert caught.value.needed_bytes > 1000
    assert "nothing fits" in str(caught.value) or "no plan fits" in str(caught.value)


def test_what_cannot_fit_is_known_before_anything_is_priced():
    """Where memory is said to leave no choice, there is none."""
    step, args = mlp_step(64, 64)
    task, told = Task(trace(step, *args), mw.Auto()), 0
    for limit in (100, 1000, 10_000, 20_000, 40_000, 80_000, 10**6):
        where = mesh((4,), memory_bytes=limit)
        try:
            task.plan([where], lambda _: None)
            fits = True
        except mw.DoesNotFit:
            fits = False
        assert task.can_fit(where) or not fits
        told += not task.can_fit(where)
    assert told >= 2


def test_without_memory_no_solve_is_begun_that_could_not_be_accepted(monkeypatch):
    """Short ones would begin again where they prove nothing; with memory they find out where it is short."""
    step, args = mlp_step(64, 64)
    given, solve = [], Run.solve

    def noted(run, seconds, *options):
        given.append((len(run.problem.row_node) > 0, seconds))
        return replace(solve(run, 600, *options), seconds=0.0)  # as on a quick machine

    monkeypatch.setattr(Run, "solve", noted)
    task = Task(trace(step, *args), mw.Auto())
    free = task.plan([mesh((4,))], lambda _: None)
    task.plan([mesh((4,), memory_bytes=0.9 * free.memory.peak_bytes)], lambda _: None, Budget(clock=lambda: 0.0))
    short, long = VIEW_TUNING.allowances[0][0], VIEW_TUNING.allowances[-1][0]
    assert max(seconds for is_held, seconds in given if is_held) == short
    without = [seconds for is_held, seconds in given if not is_held]
    assert max(without) == long and min(without) > short  # all the time that is left, where that is limited


@pytest.mark.parametrize(("seconds", "first"), [(0.01, 1.0), (0.5, 2.0)])
def test_what_took_long_without_memory_may_take_longer_with_it(monkeypatch, seconds, first):
    step, args = mlp_step(64, 64)
    given, solve = [], Run.solve

    def noted(run, seconds, *options):
        given.append(seconds)
        return solve(run, seconds, *options)

    state = ViewState(View(Task(trace(step, *args), mw.Auto()).formulate(mesh((4,))), None)).step()
    state = replace(state, free=replace(state.latest, seconds=seconds)).under(0.9 * state.peak_bytes)
    monkeypatch.setattr(Run, "solve", noted)
    assert not state.advance().has_failed
    assert given[0] == first


def test_checkpointing_needs_less_memory():
    peaks = [
        planner_of(traced_zoo("llama-tiny", layers=4, seq=128, vocab=16, checkpoint=kept), (4,))(None).memory.peak_bytes
        for kept in (False, True)
    ]
    assert peaks[1] < peaks[0]


def test_a_part_of_a_clusters_memory_is_left_to_the_runtime():
    step, args = mlp_step(64, 64, layers=2)
    machine = mw.cluster("1x4 a100-40gb")
    for share in (0.9, 0.5):
        plan = mw.plan(step, *args, cluster=machine, method=mw.Auto(memory_fraction=share))
        assert plan.memory.limit_bytes == int(share * machine.memory_bytes)


def test_every_view_is_accounted_for():
    step, args = mlp_step(64, 64, layers=2)
    plan = mw.plan(step, *args, cluster="2x4 v100-32gb")
    shapes = [view.shape for view in plan.considered]
    assert plan.mesh.sizes in shapes
    assert len(set(shapes)) == len(shapes)
    chosen = next(view for view in plan.considered if view.shape == plan.mesh.sizes)
    assert chosen.cost == pytest.approx(plan.cost.total)
    assert all(view.cost is None or view.cost >= plan.cost.total * (1 - 1e-6) for view in plan.considered)


def test_ctrl_c_ends_planning(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    step, args = mlp_step(64, 64)
    monkeypatch.setattr("meshwright.solver.run.simplify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mw.plan(step, *args, mesh=mesh((4,)))


def test_the_plan_of_least_memory_stands_where_nothing_else_was_found(monkeypatch):
    step, args = mlp_step(64, 64)
    formulation = Task(trace(step, *args), mw.Auto()).formulate(mesh((4,)))
    _, peak = least_memory(formulation)
    monkeypatch.setattr(ViewState, "step", lambda state, *_: replace(state, stage=Stage.FAILED))
    state = ViewState(View(formulation, peak)).advance()
    assert state.is_done and state.fits and state.latest.status == "feasible"
    assert ViewState(View(formulation, peak - 1)).advance().has_failed


def test_a_view_that_cannot_be_better_is_left(monkeypatch):
    step, args = mlp_step(64, 64)
    formulation = Task(trace(step, *args), mw.Auto()).formulate(mesh((4,)))
    _, peak = least_memory(formulation)
    steps, solve_once = [], ViewState.step
    monkeypatch.setattr(ViewState, "step", lambda state, gap, *rest: steps.append(gap) or solve_once(state, gap, *rest))
    best = ViewState(View(formulation, peak))
    while not best.is_done:
        best = best.advance()
        assert not best.has_failed
    assert best.fits
    steps.clear()
    other = ViewState(View(formulation, peak))
    while other.floor < best.cost / 2:
        other = other.advance(best.cost / 2)
        assert not other.has_failed and not other.is_done
    assert min(steps) > VIEW_TUNING.good_gap  # it was solved on the way only


@dataclass(frozen=True)
class Scripted(ViewState):
    """A view that takes given steps: its floor after each, and what it costs from some step on."""

    floors: tuple[float, ...] = ()
    found: float = 0.0
    fits_after: int = 1
    goals: tuple[tuple[bool, float], ...] = ()

    def step(self, gap, goal, budget):
        left, peak = self.fits_after - 1, 1.0 if self.fits_after <= 1 else 2.0
        latest = Solution(Status.FEASIBLE, np.zeros(1), self.found, self.floors[0], peak)
        state = replace(
            self, floor=self.floors[0], floors=self.floors[1:], fits_after=left, latest=latest,
            goals=(*self.goals, (gap > VIEW_TUNING.good_gap, goal)),
        )  # fmt: skip
        if not state.fits:
            return state
        return replace(state, fitted=latest, stage=Stage.DONE if gap <= VIEW_TUNING.good_gap else self.stage)


def scripted(sizes, floors, cost, fits_after=1):
    large = {"costs": [np.zeros(1)], "memory": SimpleNamespace(num_steps=VIEW_TUNING.small + 1)}  # held in rounds
    view = View(SimpleNamespace(mesh=SimpleNamespace(sizes=sizes), **large), 1.0)
    return Scripted(view, floor=floors[0], floors=tuple(floors[1:]), found=cost, fits_after=fits_after)


def best_of(*states):
    """The states at the end, the best of them, and the views in the order in which they were solved."""
    said, findings, states = [], search_module.Findings(), list(states)
    with mock.patch.object(search_module, "translated", return_value=None):
        best = search_module.solve_best(states, findings, said.append, Budget())
    assert set(findings.remarks) == {state.formulation.mesh.sizes for state in states}
    return states, best, [line.removeprefix("solving on mesh ") for line in said]


def test_views_are_solved_one_step_at_a_time_and_only_the_best_to_the_end():
    one = scripted((8,), (0.9, 1.0, 1.24), 1.4, fits_after=2)
    other = scripted((4, 2), (0.95, 1.1, 1.2, 1.25), 1.25, fits_after=2)
    (one, other), best, said = best_of(one, other)
    assert said == ["8", "4×2", "8", "4×2"]  # the last for two steps: the one from the way to the end
    assert best.view is other.view and best.is_done and not one.is_done
    assert one.goals == ((True, 0.95), (True, np.inf))
    assert other.goals == ((True, 1.0), (True, pytest.approx(1.4)), (False, np.inf))


def test_all_views_are_nearly_solved_before_any_is_solved_to_the_end():
    near, other = scripted((8,), (0.9, 0.97, 0.98), 0.98), scripted((4, 2), (0.978, 0.99), 1.0)
    _, best, said = best_of(near, other)
    assert best.view is near.view and best.is_done
    assert said == ["8", "4×2", "8"]


@pytest.mark.parametrize(("cost", "is_solved"), [(1.03, True), (1.0325, False), (1.04, False)])
def test_what_is_nearly_solved_is_left_unless_it_is_likely_to_be_much_better(cost, is_solved):
    """A quarter down from 1.03 to 0.92 is 0.25% below 1.005; from 1.0325 it is 0.06%, and from 1.04 it is above."""
    first, second = scripted((8,), (0.9, 0.99, 1.0), 1.005), scripted((4, 2), (0.9, 0.92, 0.99), cost)
    (_, other), best, _ = best_of(first, second)
    assert best.view is first.view
    assert other.is_done == is_solved


def test_only_the_best_view_is_given_more_than_one_allowance_to_the_end_while_its_gap_is_wide():
    wide, close = scripted((8,), (0.9, 0.97), 1.0), scripted((8,), (0.9, 0.985), 1.0)
    last = ((0.5, 1e-2),)
    for state, at_the_end in ((wide, VIEW_TUNING.allowances), (close, last)):
        assert state.allowances(1.0) == state.allowances(np.inf) == VIEW_TUNING.allowances
        state = state.advance()
        assert state.stage is Stage.NEAR
        assert state.allowances(1.0) == last and state.allowances(np.inf) == at_the_end


def test_a_view_that_is_taken_up_starts_from_the_best_choice_that_can_be_carried_to_it():
    asked = []

    def carried(choice, source, target):
        asked.append((source.mesh.sizes, target.mesh.sizes))
        return choice if source.mesh.sizes == (8,) else None

    states = [
        scripted((8,), (0.9, 0.97, 0.98), 1.0),
        scripted((2, 4), (0.91, 0.96, 0.97), 0.99),
        scripted((4, 2), (0.92, 0.95, 0.96), 0.98),
    ]
    with mock.patch.object(search_module, "translated", carried):
        search_module.solve_best(states, search_module.Findings(), lambda _: None, Budget())
    assert asked == [((8,), (2, 4)), ((2, 4), (4, 2)), ((8,), (4, 2))]
    assert states[0].initial is None and states[1].initial is states[2].initial is not None


def test_a_solve_that_is_far_off_when_its_seconds_are_over_begins_again():
    done = []

    class Far:
        problem = SimpleNamespace(row_node=[0])

        def solve(self, seconds, gap, goal):
            done.append(seconds)
            return Solution(Status.FEASIBLE, np.zeros(1), 1.0, self.bound, 1.0)

        def begin_again(self):
            done.append("again")

    tuning, far = ViewTuning(allowances=((1.0, 1e-2), (3.0, 5e-2), (20.0, 5e-2))), Far()
    far.bound = 0.5
    assert len(list(solves(far, tuning))) == len(list(solves(far, tuning, gap=2e-2))) == 3
    assert done == 2 * [1.0, "again", 3.0, "again", 20.0]
    far.bound = 0.96  # too far for the first allowance, but not on the way
    assert len(list(solves(far, tuning))) == 2 and len(list(solves(far, tuning, gap=2e-2))) == 1


def test_a_solve_goes_on_until_more_is_held_and_then_begins_from_what_fitted(monkeypatch):
    step, args = mlp_step(64, 64)
    formulation = Task(trace(step, *args), mw.Auto()).formulate(mesh((4,)))
    free = ViewState(View(formulation, None)).step()
    assert free.fits and free.begun is None  # proven: there is nothing to resume
    tuning, begun, solved = ViewTuning(allowances=((1.0, np.inf),)), [], []
    state = ViewState(View(formulation, 0.8 * free.peak_bytes, tuning))
    begin, solve = Run.__init__, Run.solve

    def noted(run, problem, **options):
        begun.append((len(problem.row_node), options["initial"]))
        begin(run, problem, **options)

    def unproven(run, *options):
        solved.append(run)
        return replace(solve(run, *options), status=Status.FEASIBLE, lower_bound=0.0)

    monkeypatch.setattr(Run, "__init__", noted)
    monkeypatch.setattr(Run, "solve", unproven)
    while not state.fits:
        state = state.step(0.1)
    before, fitted = len(begun), state.fitted.choice
    assert len(solved) == before > 1
    state = state.step(0.1)
    assert len(begun) == before and solved[-1] is solved[-2]
    reserved = {time: kept + 1 for time, kept in state.moments.reserved.items()}
    replace(state, moments=replace(state.moments, reserved=reserved)).step(0.1)
    assert len(begun) == before + 1 and begun[-1][1][: len(fitted)].tolist() == fitted.tolist()


@pytest.mark.parametrize(
    ("before", "bound", "goal", "done"),
    [
        (0.0, 0.993, np.inf, True),
        (0.0, 0.99, np.inf, False),
        (0.993, 0.9, np.inf, True),  # what was known before counts
        (0.0, 0.993, 0.992, False),  # left for another view
    ],
)
def test_a_choice_that_is_close_to_its_bound_will_do(monkeypatch, before, bound, goal, done):
    step, args = mlp_step(64, 64)
    state = ViewState(View(Task(trace(step, *args), mw.Auto()).formulate(mesh((4,))), None)).step()
    found = replace(state.latest, status=Status.FEASIBLE, cost=1.0, lower_bound=bound)
    monkeypatch.setattr(Run, "solve", lambda *_: found)
    state = ViewState(state.view, floor=before).advance(goal)
    assert not state.has_failed and state.is_done == done
    assert state.fitted is not None


def test_what_would_do_but_was_left_for_another_view_is_taken_up_as_before():
    state = scripted((8,), (0.9, 0.995, 0.995), 1.0).advance(0.99).advance()
    assert not state.has_failed
    assert [on_the_way for on_the_way, _ in state.goals] == [True, True]


def test_a_view_that_only_fell_behind_another_is_not_nearly_solved():
    state = scripted((8,), (0.9, 0.95, 0.96, 0.99), 1.0).advance(0.94)
    assert state.fitted is not None and state.stage is Stage.OPEN
    assert state.promise == state.floor
    state = state.advance()
    assert state.stage is Stage.NEAR
    assert state.promise == pytest.approx(1.0 - 0.25 * 0.04)
    state = state.advance()
    assert state.is_done
    assert [on_the_way for on_the_way, _ in state.goals] == [True, True, False]
    close = scripted((8,), (0.9, 0.99), 1.0)  # to its bound, so that nothing is left to be done on the way
    assert close.advance(0.94).stage is Stage.NEAR
