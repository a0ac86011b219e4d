"""A rehearsal prices a plan with measured compute and modelled communication, and says what it could not do."""

import json

import jax
import pytest
from jax.experimental import pallas as pl
from typer.testing import CliRunner

import meshwright as mw
from meshwright import zoo
from meshwright.cli.app import app
from meshwright.errors import ShardingError
from meshwright.rehearsal.parts import stand_in_s
from tests.rehearsal.share.test_program import step, weights
from tests.rehearsal.test_parts import compute_s

pytestmark = pytest.mark.devices


def arguments(batch=64):
    return jax.eval_shape(weights), jax.ShapeDtypeStruct((batch, 16), "float32")


@pytest.fixture(scope="module")
def plan():
    return mw.plan(step, *arguments(), cluster="1x8 h100", mesh=(8,), method="zero3")


@pytest.fixture(scope="module")
def found(plan):
    return plan.rehearse(steps=2, segments=False)


def test_the_cost_is_measured_compute_and_modelled_communication(plan, found):
    assert found.measured_s > found.stand_in_s > 0
    assert found.cost.compute == pytest.approx(found.measured_s - found.stand_in_s)
    assert found.cost.communication == plan.cost.communication > 0
    assert found.step_s == found.cost.compute + plan.cost.communication
    assert found.tflops_per_device == pytest.approx(plan.flops / found.step_s / 1e12)
    assert found.flops.compiled == plan.flops and found.steps == 6


def test_memory_is_that_of_the_program_on_all_devices():
    plan = mw.plan(step, *arguments(2**16), cluster="local", mesh=(8,), method="zero3")
    compiled = plan.verify().memory.compiled
    assert plan.rehearse(steps=0).memory.compiled == pytest.approx(compiled, rel=0.1)


def test_it_is_shown_in_one_line_and_as_a_table(found):
    assert repr(found).startswith("<Rehearsal: x=8 on cpu, step ") and "\n" not in repr(found)
    for word in ("compute", "communication", "modelled", "measured, 6 steps", "memory", "FLOPs", "stand-ins"):
        assert word in str(found)
    assert "It was measured on cpu; the plan is for h100" in str(found)
    assert json.loads(json.dumps(found.to_json()))["step_s"] == found.step_s


def test_the_parts_are_measured_by_themselves(plan, monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    found = plan.rehearse(steps=1)
    assert len(found.segments) > 1 and all(item.compute_s > 0 for item in found.segments)
    assert sum(item.count * item.flops for item in found.segments) == plan.flops
    assert sum(item.count * item.modelled_s for item in found.segments) == pytest.approx(compute_s(plan, num_devices=1))
    assert "parts of the share" in str(found) and found.segments[0].label in str(found)


def test_without_steps_it_is_compiled_alone(plan):
    found = plan.rehearse(steps=0)
    assert found.measured_s is None and found.cost == plan.cost and "not run" in repr(found)
    assert found.memory.compiled > 0


def test_stand_ins_are_counted_by_their_bytes(plan, found):
    gathers = [c for c in plan.collectives if c.kind == "all_gather"]
    expected = sum(c.bytes * (1 + 1 / 8) for c in gathers) / (
        plan.mesh.chip.memory_bandwidth * plan.mesh.chip.memory_efficiency
    )
    assert gathers and sum(stand_in_s(plan.mesh, c) for c in gathers) == pytest.approx(expected)
    assert found.stand_in_s == sum(stand_in_s(plan.mesh, c) for c in plan.collectives)


def test_a_loaded_plan_must_be_given_its_function(plan, found, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = mw.Plan.load(tmp_path / "plan.json")
    with pytest.raises(ShardingError, match=r"does not know its function: call plan.rehearse\(function"):
        loaded.rehearse()
    with pytest.raises(ShardingError, match="make the plan again"):
        loaded.rehearse(step, *arguments(128), steps=0)
    assert loaded.rehearse(step, *arguments(), steps=0).memory.compiled == found.memory.compiled


def test_bad_numbers_of_steps_are_refused(plan):
    for steps in (-1, 1.5, True):
        with pytest.raises(ShardingError, match="give the number of steps to time"):
            plan.rehearse(steps=steps)


def test_the_command_knows_models_of_the_zoo(tmp_path):
    example = zoo.build("mlp", batch=64)
    plan = mw.plan(example.train_step, example.state, example.batch, cluster="1x8 h100", mesh=(8,), method="data")
    plan.save(tmp_path / "plan.json")
    run = CliRunner().invoke(
        app, ["rehearse", str(tmp_path / "plan.json"), "--batch", "64", "--steps", "1", "--no-segments", "--json", "-"]
    )
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["planned_flops"] == plan.flops


def test_a_pallas_kernel_runs_on_the_blocks_of_one_device():
    def scaled(x):
        rows = pl.BlockSpec((2, 8), lambda i: (i, 0))
        grid = (x.shape[0] // 2,)
        return pl.pallas_call(doubled, x, grid=grid, in_specs=[rows], out_specs=rows, interpret=True)(x)

    def doubled(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    x = jax.ShapeDtypeStruct((64, 8), "float32")
    plan = mw.plan(scaled, x, cluster="1x8 h100", method=mw.Manual({"x": jax.P("x")}))
    assert "ran whole" not in str(plan.rehearse(steps=0))
