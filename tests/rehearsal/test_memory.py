"""What a rehearsal or a profile found of memory corrects the plan, and is the limit of the next."""

from dataclasses import replace

import jax
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.errors import DoesNotFit
from meshwright.planner.budget import Budget
from meshwright.planner.planner import plan_program
from meshwright.planner.pricing.corrections import Corrections
from meshwright.profiler.measurements import open_database
from meshwright.rehearsal.memory import keep_memory, known_memory, modelled_bytes, with_memory
from meshwright.runtime.microbatches.planned_parts import traced_as_planned
from tests.rehearsal.share.test_program import step, weights

ARGS = jax.eval_shape(weights), jax.ShapeDtypeStruct((2**12, 16), "float32")


def solved(plan, factor, **options):
    method = mw.Auto(**options)
    return plan_program(plan.origin, [plan.mesh], method, print, Budget(None), Corrections(memory=factor))


def test_a_plan_is_made_for_what_programs_were_found_to_need():
    plan = mw.plan(step, *ARGS, cluster="1x1 h100", mesh=(1,))
    assert solved(plan, 2.0).memory.peak_bytes == 2 * plan.memory.peak_bytes
    assert solved(plan, 2.0).memory.limit_bytes == plan.memory.limit_bytes
    part = 1.5 * plan.memory.peak_bytes / plan.mesh.memory_bytes
    assert solved(plan, 1.0, memory_fraction=part).memory.peak_bytes <= 1.5 * plan.memory.peak_bytes
    with pytest.raises(DoesNotFit) as refused:
        solved(plan, 2.0, memory_fraction=part)
    assert refused.value.limit_bytes == pytest.approx(part * plan.mesh.memory_bytes, abs=1)
    assert refused.value.needed_bytes == 2 * plan.memory.peak_bytes


def test_the_next_plan_knows_what_the_last_was_found_to_need(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("MESHWRIGHT_MEASURE", "once")
    plan = mw.plan(step, *ARGS, cluster="1x1 h100", mesh=(1,))
    needed = 3 * plan.memory.peak_bytes
    assert with_memory(plan, needed).memory.peak_bytes == needed
    assert modelled_bytes(with_memory(plan, needed)) == pytest.approx(plan.memory.peak_bytes)
    with open_database() as database:
        keep_memory(database, plan, plan.origin, needed, modelled_bytes(plan))
    assert known_memory(plan.origin, plan.mesh.chip) == pytest.approx((3, 1))
    assert mw.plan(step, *ARGS, cluster="1x1 h100", mesh=(1,)).memory.peak_bytes == pytest.approx(needed)


def test_what_one_change_of_a_step_needs_counts_for_others_until_they_are_known(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("MESHWRIGHT_MEASURE", "once")
    where = {"cluster": "1x1 h100", "mesh": (1,)}
    whole, halves, quarters = (mw.plan(step, *ARGS, **where, method=mw.Auto(microbatches=count)) for count in (1, 2, 4))
    changed = [traced_as_planned(plan, plan.origin) for plan in (whole, halves, quarters)]
    assert changed[0].written is None and changed[2].written is not None
    with open_database() as database:
        keep_memory(database, whole, changed[0], 3, 2)
        keep_memory(database, halves, changed[1], 5, 4)
    assert [known_memory(one, whole.mesh.chip).whole for one in changed] == [1.5, 1.25, 1.5]


@pytest.mark.devices
def test_a_pipelines_stages_are_planned_for_what_they_were_found_to_need(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("MESHWRIGHT_MEASURE", "once")
    own, example = mw.hardware.cluster("1x4 cpu"), zoo.build("mlp", batch=64)
    args, method = (example.train_step, example.state, example.batch), mw.ThreeD(data=2, pipeline=2, microbatch=8)
    plan = mw.plan(*args, cluster=own, method=method)
    found = plan.rehearse(steps=0)
    ratio = max(stage.memory.ratio for stage in found.stages)
    assert found.corrected.memory.peak_bytes == max(stage.memory.compiled for stage in found.stages)
    assert known_memory(plan.origin, plan.mesh.chip) == pytest.approx((1, ratio))
    following = mw.plan(*args, cluster=own, method=method)
    assert following.memory.limit_bytes == pytest.approx(plan.memory.limit_bytes, abs=1)
    for before, after, measured in zip(plan.stages, following.stages, found.stages, strict=True):
        assert after.peak_bytes == pytest.approx(ratio * before.peak_bytes, abs=2)
        assert after.peak_bytes >= measured.memory.compiled - 2
    part = 0.99 * following.memory.peak_bytes / plan.mesh.memory_bytes
    tight = mw.plan(*args, cluster=own, method=replace(method, memory_fraction=part))
    assert tight.rehearse(steps=0).corrected.memory.peak_bytes <= tight.memory.limit_bytes
    with pytest.raises(DoesNotFit) as refused:
        mw.plan(*args, cluster=own, method=replace(method, memory_fraction=part / 8))
    assert refused.value.limit_bytes == pytest.approx(part / 8 * plan.mesh.memory_bytes, abs=1)
