"""Pipelines, planned against compiled: the figures are those of the programs and transfers that run."""

import json
from dataclasses import replace

import jax
import pytest

import meshwright as mw
from meshwright.runtime.checking.figures import Compared
from meshwright.runtime.checking.verify_stages import ACTIVATIONS, GRADIENTS, SHARED
from tests.runtime.stages.models import build

pytestmark = pytest.mark.devices

WIDTH, ROWS, MICROBATCHES, WORDS = 64, 16, 4, 11


@pytest.fixture(scope="module")
def model():
    init, train_step, batch = build(width=WIDTH, rows=ROWS)
    return jax.jit(train_step, donate_argnums=0), jax.eval_shape(init, jax.random.key(0)), batch


@pytest.fixture(scope="module")
def plan(model):
    train_step, state, batch = model
    return mw.plan(train_step, state, batch, cluster="1x2 cpu", method=mw.ThreeD(pipeline=2, microbatch=4))


@pytest.fixture(scope="module")
def found(plan):
    return plan.verify()


def test_stages_send_compute_and_hold_what_was_planned(plan, found):
    first, last = found.stages
    activation = ROWS * WIDTH * 4  # of all microbatches
    assert first.sent[ACTIVATIONS] == last.sent[GRADIENTS] == Compared(activation, activation)
    assert ACTIVATIONS not in last.sent and GRADIENTS not in first.sent
    # The tied embedding goes to the last stage, and its gradient comes back, with a few sums for the norm.
    embedding = WORDS * WIDTH * 4
    assert last.sent[SHARED].planned == embedding
    assert embedding <= last.sent[SHARED].compiled < embedding + 64
    for stage, verified in zip(plan.stages, found.stages, strict=True):
        assert verified.collectives == {}
        assert verified.flops.compiled == verified.flops.planned == stage.flops
        assert verified.memory.planned == stage.peak_bytes
        state = sum(4 * jax.numpy.zeros(t.shape).size for t in stage.tensors)
        assert state < verified.memory.compiled < 2 * stage.peak_bytes
        assert verified.arrays.planned == stage.peak_bytes - stage.transient_bytes
        assert state < verified.arrays.compiled < verified.memory.compiled
        assert verified.arrays.ratio == pytest.approx(1.0, abs=0.05)  # with gradients once, or it would be 1.15


def test_collectives_inside_of_stages_are_counted_as_often_as_their_programs_run():
    init, step, batch = build(layers=3, width=WIDTH, rows=ROWS)  # so small that replicas hold all state
    train_step, state = jax.jit(step, donate_argnums=0), jax.eval_shape(init, jax.random.key(0))
    recipe = mw.ThreeD(pipeline=2, data=2, microbatch=4)
    plan = mw.plan(train_step, state, batch, cluster="1x4 cpu", method=recipe)
    found = plan.verify()
    for stage, verified in zip(plan.stages, found.stages, strict=True):
        size = sum(4 * jax.numpy.zeros(t.shape).size for t in stage.tensors if t.role == "parameters")
        sums = verified.collectives["all_reduce", ("x",)]
        assert sums.planned == size  # once a step, whatever the number of microbatches
        assert size <= sums.compiled <= 1.01 * size
        assert verified.bytes.planned > sums.planned
        assert verified.arrays.ratio == pytest.approx(1.0, abs=0.05)


def test_a_plan_that_says_something_else_is_found_out(plan, model):
    stage = replace(plan.stages[0], flops=2 * plan.stages[0].flops, send_bytes=0.0)
    found = replace(plan, stages=(stage, plan.stages[1])).verify(*model)
    assert found.stages[0].flops.ratio == 0.5
    assert found.stages[0].sent[ACTIVATIONS].ratio == float("inf")


def test_it_prints_a_table_and_plain_data(found):
    lines = str(found).splitlines()
    assert lines[0].startswith("Compiled ") and "2 cpu" in lines[0]
    assert [line for line in lines if line.startswith("stage")] == ["stage 0", "stage 1"]
    assert any(line.split()[:2] == ["activations", "sent"] for line in lines)
    data = json.loads(json.dumps(found.to_json()))
    assert data["stages"][0]["flops"]["ratio"] == 1.0 and data["backend"] == "2 cpu"


def test_a_plan_for_more_devices_says_so(model):
    plan = mw.plan(*model, cluster="2x8 cpu", method=mw.ThreeD(pipeline=2, data=8, microbatch=2))
    with pytest.raises(mw.ClusterError, match="2 stages on 16 devices, and there are 8"):
        plan.verify()
