"""Methods side by side: a row for each, predicted and found, and never a crash over one that cannot be."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.plans.text import status_text
from meshwright.training.compare import METHODS
from meshwright.training.comparison import ComparedMethod, Comparison
from tests.runtime.stages.models import build
from tests.runtime.steps import CPU, batch, params, train_step

pytestmark = pytest.mark.devices


@pytest.fixture(scope="module")
def found():
    return mw.compare(train_step, params(), batch(), cluster=CPU, steps=3)


def test_every_method_is_predicted_and_measured(found):
    assert [row.method for row in found.rows] == [method.name for method in METHODS]
    for row in found.rows:
        assert row.reason == "" and row.plan.method == row.method
        assert row.predicted_s > 0 and row.measured_s > 0
        assert row.predicted_peak_bytes > 0 and row.compiled_peak_bytes > 0
    assert found.steps == 3
    assert found.best.measured_s == min(row.measured_s for row in found.rows)


def test_the_bytes_sent_are_those_of_the_compiled_program():
    found = mw.compare(train_step, params(), batch(1024), methods=[mw.DataParallel()], cluster=CPU, steps=0)
    gradients = sum(p.nbytes for p in params().values())
    loss = 4
    assert found.rows[0].predicted_collective_bytes == gradients + loss
    assert found.rows[0].compiled_collective_bytes == gradients + loss
    assert found.rows[0].measured_s is None and found.note == ""


def test_it_prints_as_a_table(found):
    lines = str(found).splitlines()
    assert lines[0] == "methods: predicted → compiled or measured"
    assert lines[1].split() == ["method", "mesh", "step", "memory", "collectives"]
    assert [line.split()[0] for line in lines[2:]] == [row.method for row in found.rows]
    assert all(line.count("→") == 3 for line in lines[2:])


def test_the_best_is_that_of_the_shortest_step_measured_where_any_was():
    auto, zero = ComparedMethod("Auto", predicted_s=0.504), ComparedMethod("Zero-3", predicted_s=0.500)
    assert Comparison((auto, zero), 0).best is zero
    measured = [replace(auto, measured_s=0.51), replace(zero, measured_s=0.52)]
    assert Comparison(tuple(measured), 3).best is measured[0]
    assert Comparison((ComparedMethod("Auto", reason="does not fit"),), 0).best is None


def test_a_plan_is_called_optimal_for_the_cost_model_alone():
    plan = mw.plan(train_step, *jax.eval_shape(lambda: (params(), batch(64))), cluster="1x2 h100")
    assert plan.solution.status == "optimal" and "optimal for the cost model, at most" in str(plan)
    assert status_text(replace(plan, solution=replace(plan.solution, status="feasible"))) == "feasible"


def test_its_json_is_plain_data(found):
    data = json.loads(json.dumps(found.to_json()))
    assert data["steps"] == 3 and [row["method"] for row in data["rows"]] == [row.method for row in found.rows]
    assert data["rows"][0]["mesh"] == found.rows[0].mesh and "plan" not in data["rows"][0]


def test_pricing_alone_needs_neither_devices_nor_arrays():
    types = jax.eval_shape(lambda: (params(), batch(64)))
    found = mw.compare(train_step, *types, methods=[mw.Auto(), mw.Zero(3)], cluster="4x8 h100", run=False)
    assert all(row.predicted_s > 0 and row.compiled_peak_bytes is None for row in found.rows)
    assert found.steps == 0 and found.best.method == "Auto"
    assert str(found).splitlines()[0] == "methods: predicted" and "→" not in str(found).split("\n", 1)[1]


def test_too_few_devices_leave_the_prediction_and_say_so():
    found = mw.compare(train_step, params(), batch(64), methods=[mw.DataParallel()], cluster="4x8 h100")
    (row,) = found.rows
    assert row.predicted_s > 0 and row.measured_s is None
    assert "32 devices and there are 8" in row.reason and "32 devices and there are 8" in " ".join(str(found).split())


def test_types_are_compiled_but_not_timed():
    types = jax.eval_shape(lambda: (params(), batch()))
    found = mw.compare(train_step, *types, methods=[mw.Zero(3)], cluster=CPU)
    assert found.rows[0].compiled_peak_bytes > 0 and found.rows[0].measured_s is None
    assert found.steps == 0 and "give arrays" in str(found)


def test_a_method_that_is_refused_or_does_not_fit_is_a_row_with_the_reason():
    methods = [mw.DataParallel(), mw.Auto(memory_fraction=1e-9), mw.Auto()]
    found = mw.compare(train_step, params(), batch(12), methods=methods, cluster=CPU, mesh=(8,), steps=1)
    uneven, tight, auto = found.rows
    assert "the batch has 12 rows" in uneven.reason and uneven.plan is None and uneven.mesh is None
    assert "memory" in tight.reason and tight.measured_s is None
    assert auto.reason == "" and auto.measured_s > 0
    assert found.best is auto and "12 rows" in " ".join(str(found).split())


def test_arguments_are_left_as_they_were():
    step = mw.parallelize(train_step, cluster=CPU, method=mw.Zero(3))
    state = mw.create_state(lambda: jax.tree.map(jnp.asarray, params()), like=step, example=(batch(),))
    mw.compare(step, state, batch(), methods=[mw.Zero(3), mw.DataParallel()], steps=2)
    np.testing.assert_array_equal(state["in"], params()["in"])


def test_a_parallelised_function_keeps_its_settings():
    def scaled(state, batch, power):
        new, value = train_step(state, batch)
        return new, value["loss"] ** power

    step = mw.parallelize(scaled, cluster=CPU, mesh=(4, 2), microbatches=2, static_argnums=(2,))
    found = mw.compare(step, params(), batch(), 2, methods=[mw.Zero(1), mw.Zero(3)], steps=1)
    assert [row.mesh for row in found.rows] == [{"x": 4, "y": 2}] * 2
    assert all(row.measured_s > 0 for row in found.rows)
    elsewhere = mw.compare(step, params(), batch(), 2, methods=[mw.Zero(1)], cluster="1x4 h100", run=False)
    assert elsewhere.rows[0].mesh == {"x": 4}


def test_what_is_donated_and_does_not_come_back_is_made_again():
    step = mw.parallelize(lambda x, y: {"new": x + y}, cluster=CPU, donate_argnums=0, batch_argnums=(0, 1))
    x = jnp.ones((8, 4))
    found = mw.compare(step, x, x, methods=[mw.DataParallel()], steps=2)
    assert found.rows[0].measured_s > 0 and not x.is_deleted()


@pytest.mark.parametrize("steps", [-1, 2.5, True])
def test_steps_that_cannot_be(steps):
    with pytest.raises(mw.ShardingError, match="steps is"):
        mw.compare(train_step, params(), batch(), steps=steps)


def test_pipelines_stand_beside_programs_without_stages():
    init, step, data = build(width=32)
    methods = [mw.DataParallel(), mw.ThreeD(pipeline=2, data=2, microbatch=4), mw.ThreeD(pipeline=2, microbatch=4)]
    state = init(jax.random.key(0))
    found = mw.compare(step, state, data, methods=methods, cluster="1x4 cpu", steps=2)
    plain, staged, small = found.rows
    assert plain.reason == staged.reason == "" and "4" in small.reason  # a recipe uses all devices
    assert staged.mesh == {"stages": 2, "x": 2, "y": 1}
    assert staged.measured_s > 0 and plain.measured_s > 0
    assert staged.predicted_collective_bytes > 0 and staged.compiled_collective_bytes > 0
    assert staged.compiled_peak_bytes > 0
    assert not jax.tree.leaves(state)[0].is_deleted()
