"""`mw.Auto(profile=True)` plans by what was measured, says what is measured and what modelled, and always returns."""

import threading
import time
from dataclasses import replace

import jax
import pytest

import meshwright as mw
from meshwright.errors import ShardingError
from meshwright.planner.budget import Budget
from meshwright.planner.methods import Auto
from meshwright.planner.planner import plan_program
from meshwright.planner.pricing.corrections import Corrections
from meshwright.profiler.measurements import measured_now, open_database
from meshwright.rehearsal import search, whole_steps
from meshwright.rehearsal.learning.calibration import WORK
from meshwright.rehearsal.learning.from_parts import Measured, compute_s, corrections, leaders
from meshwright.rehearsal.measuring import Candidate, Measuring, StepCandidate
from meshwright.rehearsal.memory import MEMORY
from meshwright.rehearsal.parts import parts_of
from meshwright.rehearsal.whole_steps import compiled_in, step_times
from tests.rehearsal.share.test_program import step, weights

PROFILE = mw.Auto(profile=True, profile_seconds=60, mesh_shapes=[(8,)])


def arguments(batch=64):
    return jax.eval_shape(weights), jax.ShapeDtypeStruct((batch, 16), "float32")


@pytest.fixture(scope="module")
def plan():
    # A batch so large that no product is cheaper as a whole on every device, by any factor that the tests apply.
    return mw.plan(step, *arguments(2**20), cluster="1x8 h100", mesh=(8,), method="data")


def measured(plan, part, seconds):
    key = Candidate(plan, plan.origin, part).key(jax.devices()[0])
    return Measured(plan, part, measured_now(key, "rehearsed", seconds))


def test_ratios_correct_the_strategies_that_were_measured(plan):
    part = max(parts_of(plan, plan.origin.graph), key=lambda p: p.flops)
    corrected = corrections([measured(plan, part, 3 * part.modelled_s)])
    strategies = leaders(plan)
    for index in part.operations:
        assert corrected.usual[index] == pytest.approx(3)
        if index in strategies:
            assert corrected.measured[(8,), index, strategies[index]] == pytest.approx(3)
    again = plan_program(plan.origin, [plan.mesh], mw.DataParallel(), str, Budget(None), corrected)
    assert again.ops == plan.ops
    # Followers that belong to another part take the factor of their leader, too; nothing takes more.
    assert plan.cost.compute + 2 * part.modelled_s <= 1.001 * again.cost.compute <= 1.002 * 3 * plan.cost.compute
    row = measured(plan, part, 3 * part.modelled_s)
    assert compute_s([row], corrected) == (pytest.approx(3 * part.modelled_s), 0.0)
    assert compute_s([replace(row, found=None)], corrected) == (0.0, pytest.approx(3 * part.modelled_s))


def test_a_strategy_that_was_measured_to_be_slow_is_avoided():
    args = jax.ShapeDtypeStruct((4096, 4096), "bfloat16"), jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    plan = mw.plan(lambda x, w: x @ w, *args, cluster="1x2 h100", mesh=(2,))
    ((leader, strategy),) = leaders(plan).items()
    slow = Corrections({leader: 1.0}, {((2,), leader, strategy): 100.0})
    other = plan_program(plan.origin, [plan.mesh], Auto(), str, Budget(None), slow)
    assert leaders(other)[leader] != strategy and other.cost.compute < 2.1 * plan.cost.compute


@pytest.mark.devices
def test_it_plans_by_measurement_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    found = mw.plan(step, *arguments(), cluster="local", method=PROFILE)
    (said,) = [r for r in found.remarks if r.startswith("Measured on the devices of the mesh: ")]
    assert found.step_s == pytest.approx(found.cost.total)  # it ran with its communication
    assert "TFLOP/s a device" in said and said[:-1].lower() == found.provenance["profile"].lower()
    with open_database() as database:
        rows = [row for row in database.rows() if not row.key.fingerprint.startswith((WORK, MEMORY))]
        assert len(database) > len(rows)  # the work of each class is kept, too
    assert rows and {row.kind for row in rows} == {"whole"} and {row.key.link for row in rows} == {"1x8"}
    again = mw.plan(step, *arguments(), cluster="local", method=PROFILE)
    with open_database() as database:
        assert [row for row in database.rows() if not row.key.fingerprint.startswith((WORK, MEMORY))] == rows
    assert again.cost.compute > 0 and again.solution.lower_bound <= again.cost.total
    found.save(tmp_path / "plan.json")
    assert mw.Plan.load(tmp_path / "plan.json") == found


def test_one_device_is_priced_by_the_whole_step_which_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    found = mw.plan(step, *arguments(), cluster="1x1 cpu", method=mw.Auto(profile=True, profile_seconds=60))
    (said,) = [r for r in found.remarks if r.startswith("Measured as one device's share: ")]
    assert " of compute in the whole step; its parts by themselves " in said
    with open_database() as database:
        (whole,) = [row for row in database.rows() if row.key.fingerprint.startswith("step-")]
    assert found.cost.total == pytest.approx(whole.seconds) and found.step_s == pytest.approx(whole.seconds)
    again = mw.plan(step, *arguments(), cluster="1x1 cpu", method=mw.Auto(profile=True, profile_seconds=1e-6))
    assert again.cost.total == found.cost.total


def test_a_step_that_does_not_compile_in_time_is_priced_by_its_parts(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    clock, compiled = time.perf_counter, []
    monkeypatch.setattr(StepCandidate, "compile", lambda *_: compiled.append(1))
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 300 * len(compiled))
    found = mw.plan(step, *arguments(), cluster="1x1 cpu", method=mw.Auto(profile=True, profile_seconds=600))
    assert len(compiled) == 2  # each time for half of the seconds
    assert "Not everything was measured within 600 s; more time measures more." in found.remarks
    (said,) = [r for r in found.remarks if r.startswith("Measured as one device's share: ")]
    assert "in the whole step" not in said


@pytest.mark.devices
def test_an_interrupt_still_gives_a_plan(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))

    def say(text):
        if text.startswith("measuring 2"):
            raise KeyboardInterrupt

    found = mw.plan(step, *arguments(), cluster="local", method=PROFILE, on_progress=say)
    assert "Measuring was interrupted; the plan uses what was measured until then." in found.remarks
    assert any(remark.startswith("Measured on the devices of the mesh: ") for remark in found.remarks)
    with open_database() as database:
        assert len([row for row in database.rows() if not row.key.fingerprint.startswith((WORK, MEMORY))]) == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room"), "RESOURCE_EXHAUSTED: no room"),
        (TimeoutError(), "there was no time to compile them"),
    ],
    ids=["memory", "time"],
)
def test_plans_that_cannot_both_run_leave_the_models_plan_and_a_remark(monkeypatch, plan, error, reason):
    other = mw.plan(step, *arguments(), cluster="1x8 h100", mesh=(8,), method="zero3")
    assert other.ops != plan.ops

    def fail(*_):
        raise error

    monkeypatch.setattr(search.MeasuredSearch, "_is_here", lambda *_: True)
    monkeypatch.setattr(search, "compiled_in", fail)
    one = search.MeasuredSearch(plan.origin, [plan.mesh], PROFILE, str, database=None)
    one.measuring, one.steps = Measuring(jax.devices()[0], None), {}
    assert one._faster(plan, other) is plan
    assert one.remarks == [f"The model's plan is kept, since both plans could not be run ({reason})."]


@pytest.mark.devices
def test_the_whole_program_is_compiled_once_and_in_time(plan, monkeypatch):
    here = mw.plan(step, *arguments(), cluster="local", mesh=(8,), method="zero3")
    compiled = compiled_in(float("inf"), here, here.origin)
    assert all(seconds > 0 for seconds in step_times([compiled, compiled]))
    go_on = threading.Event()
    monkeypatch.setattr(whole_steps, "spmd", lambda *_: go_on.wait())
    with pytest.raises(TimeoutError):
        compiled_in(0.01, here, here.origin)
    go_on.set()


def test_without_the_chip_the_model_plans_alone(plan):
    found = mw.plan(step, *arguments(), cluster="1x8 h100", mesh=(8,), method=PROFILE)
    assert any(r.startswith("Nothing was measured: no device here is a h100") for r in found.remarks)
    assert found.cost == mw.plan(step, *arguments(), cluster="1x8 h100", mesh=(8,)).cost


def test_bad_options_are_refused():
    with pytest.raises(ShardingError, match="profile_seconds is 0; give a number above 0"):
        mw.Auto(profile=True, profile_seconds=0)
    with pytest.raises(ShardingError, match="profile=True measures plans of one program"):
        mw.Auto(profile=True, pipeline=True)
