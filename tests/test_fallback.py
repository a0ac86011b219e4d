"""Refinements that meet what they do not expect: the plan is made in the plain way, and says so."""

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.fallback import STRICT, Refinements
from meshwright.plan_files.storage import plan_from_json, plan_to_json
from meshwright.rules import registry

X, W = (jax.ShapeDtypeStruct((8, 8), jnp.float32) for _ in range(2))

# Where a refinement is called, and how its remark begins.
REFINEMENTS = {
    "meshwright.planner.grouping.groups.find_accumulated": "The search for sums that a loop adds up",
    "meshwright.planner.grouping.groups.find_joining": "The search for sums that can be settled together",
    "meshwright.planner.grouping.groups.find_starts": "The search for sums that start together",
    "meshwright.planner.planner.liveness": "The model of fusion",
    "meshwright.planner.planner.proven": "The lower bound",
    "meshwright.planner.pricing.memory.MemoryModel._unsettled": "The search with all refinements",
}


def step(w, x):
    def body(carry, row):
        return carry + jnp.tanh(x @ w).T @ (x * row), None

    total, _ = jax.lax.scan(body, jnp.zeros((8, 8)), x)
    return w - total


def fails(*args, **kwargs):
    raise KeyError(30)


@pytest.mark.parametrize("place", REFINEMENTS)
def test_a_refinement_that_fails_is_left_out_and_the_plan_says_so(place, monkeypatch):
    monkeypatch.setattr(place, fails)
    with pytest.raises(KeyError):
        mw.plan(step, W, X, cluster="local", mesh=(8,))
    monkeypatch.setenv(STRICT, "0")
    plan = mw.plan(step, W, X, cluster="local", mesh=(8,))
    assert [remark.startswith(REFINEMENTS[place]) and "KeyError: 30" in remark for remark in plan.remarks] == [True]
    assert plan.memory.peak_bytes >= 2 * 8 * 8 * 4 / 8 and plan.solution.lower_bound >= 0
    assert "failed unexpectedly" in str(plan)


def test_the_search_for_stages_gives_way_to_one_program(monkeypatch):
    monkeypatch.setattr("meshwright.pipeline.planner.start_search", fails)
    monkeypatch.setenv(STRICT, "0")
    plan = mw.plan(step, W, X, cluster="1x4 a100-40gb", method=mw.Auto(pipeline=True))
    assert not plan.stages and "The search for stages" in plan.remarks[0]


def test_nothing_is_left_out_of_an_ordinary_plan():
    assert mw.plan(step, W, X, cluster="local", mesh=(8,)).remarks == ()


def test_errors_of_the_user_are_not_taken_for_failures(monkeypatch):
    monkeypatch.setenv(STRICT, "0")

    def refuses():
        raise mw.ShardingError("no such axis")

    refined = Refinements()
    with pytest.raises(mw.ShardingError):
        refined("It", "nothing is done", refuses, dict)
    assert refined("It", "nothing is done", fails, dict) == {}
    assert refined("It", "nothing is done", fails, dict) == {}  # is said once
    assert refined.remarks == ["It failed unexpectedly (KeyError: 30) and was skipped: nothing is done."]


def test_a_rule_that_fails_leaves_its_operation_whole(monkeypatch):
    monkeypatch.setitem(registry.builtin_rules(), "tanh", fails)
    with pytest.raises(KeyError):
        mw.plan(step, W, X, cluster="1x4 a100-40gb")
    monkeypatch.setenv(STRICT, "0")
    assert "tanh" in mw.plan(step, W, X, cluster="1x4 a100-40gb").unsplittable


def test_remarks_are_saved_and_files_without_them_are_read():
    plan = mw.plan(step, W, X, mesh=mw.Mesh.abstract((2,), alpha=1.0, beta=1.0))
    data = plan_to_json(plan) | {"remarks": ["It was made on a Monday."]}
    assert plan_from_json(data).remarks == ("It was made on a Monday.",)
    assert plan_to_json(plan_from_json(data))["remarks"] == ["It was made on a Monday."]
    del data["remarks"]
    assert plan_from_json(data).remarks == ()
