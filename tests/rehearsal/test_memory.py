"""What a rehearsal or a profile found of memory corrects the plan, and is the limit of the next."""

import jax
import pytest

import meshwright as mw
from meshwright.errors import DoesNotFit
from meshwright.planner.budget import Budget
from meshwright.planner.planner import plan_program
from meshwright.planner.pricing.corrections import Corrections
from meshwright.profiler.measurements import open_database
from meshwright.rehearsal.memory import keep_memory, known_memory, modelled_bytes, with_memory
from tests.rehearsal.test_program import step, weights

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
    with pytest.raises(DoesNotFit):
        solved(plan, 2.0, memory_fraction=part)


def test_the_next_plan_knows_what_the_last_was_found_to_need(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("MESHWRIGHT_MEASURE", "once")
    plan = mw.plan(step, *ARGS, cluster="1x1 h100", mesh=(1,))
    needed = 3 * plan.memory.peak_bytes
    assert with_memory(plan, needed).memory.peak_bytes == needed
    assert modelled_bytes(with_memory(plan, needed)) == pytest.approx(plan.memory.peak_bytes)
    with open_database() as database:
        keep_memory(database, plan, plan.origin.graph, needed)
    assert known_memory(plan.origin.graph, plan.mesh.chip) == pytest.approx(3)
    assert mw.plan(step, *ARGS, cluster="1x1 h100", mesh=(1,)).memory.peak_bytes == pytest.approx(needed)
