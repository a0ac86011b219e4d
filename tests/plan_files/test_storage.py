"""Plan files: what is saved comes back, byte for byte the same, and damage is said with a remedy."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.plan_files.storage import VERSION
from meshwright.plans.plan import Cost, SolutionSummary
from meshwright.plans.text import gap_text
from tests.planner.examples import mesh, mlp_step


@pytest.fixture(scope="module")
def planned():
    step, args = mlp_step(16, 16, layers=2)
    return mw.plan(step, *args, mesh=mesh((2, 2))), args


def test_a_plan_comes_back_equal(planned, tmp_path):
    plan, args = planned
    plan.save(tmp_path / "plan.json")
    again = mw.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.in_shardings == plan.in_shardings
    assert again.out_shardings == plan.out_shardings
    assert jax.tree.structure(again.in_shardings) == jax.tree.structure(args)  # Optax's named tuples too
    assert again.collectives == plan.collectives
    assert again.ops == plan.ops
    assert again.sharding("state/params/*") == plan.sharding("state/params/*")
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_equal_plans_make_equal_files(planned, tmp_path):
    step, args = mlp_step(16, 16, layers=2)
    planned[0].save(tmp_path / "one.json")
    mw.plan(step, *args, mesh=mesh((2, 2))).save(tmp_path / "two.json")
    assert json.loads((tmp_path / "one.json").read_text()) == json.loads((tmp_path / "two.json").read_text())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text.replace(f'"version": {VERSION}', '"version": 99'), "version 99.*make the plan again"),
        (lambda text: text[: len(text) // 2], "not valid JSON.*save the plan again"),
        (lambda text: "not a plan", "not valid JSON"),
        (lambda text: "[]", "is not a plan"),
        (lambda text: text.replace('"arguments"', '"argument"'), "damaged plan.*save the plan again"),
    ],
)
def test_a_bad_file_is_said_with_a_remedy(planned, tmp_path, damage, words):
    path = tmp_path / "plan.json"
    planned[0].save(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(mw.PlanFileError, match=words):
        mw.Plan.load(path)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(mw.PlanFileError, match="there is no plan file"):
        mw.Plan.load(tmp_path / "nowhere.json")


def test_a_plan_by_earlier_prices_says_so_and_keeps_its_costs(tmp_path):
    step, args = mlp_step(16, 16, layers=2)
    plan, path = mw.plan(step, *args, cluster="1x2 h100"), tmp_path / "plan.json"
    plan.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 6}))
    again = mw.Plan.load(path)
    assert again.cost == plan.cost and len(again.remarks) == len(plan.remarks) + 1
    assert "by the rates of kernels that run alone" in again.remarks[-1] and "Make it again" in again.remarks[-1]
    again.save(path)
    assert mw.Plan.load(path).remarks == again.remarks


def test_a_plan_of_the_first_version_is_read(planned, tmp_path):
    """It has no record of the search: how it is split can be told, but not what else was possible."""
    path = tmp_path / "plan.json"
    planned[0].save(path)
    data = json.loads(path.read_text()) | {"version": 1}
    del data["record"], data["judgement"]
    path.write_text(json.dumps(data))
    again = mw.Plan.load(path)
    assert again.ops == planned[0].ops and again.sharding("*") == planned[0].sharding("*")
    assert "parallel" in str(again) or "splits nothing" in str(again)
    with pytest.raises(mw.ShardingError, match="keeps no record of its search"):
        again.explain("x")


@pytest.mark.parametrize("part", ["ops", "collectives", "record", "judgement"])
def test_damage_in_what_is_read_late_is_said_then(planned, tmp_path, part):
    path = tmp_path / "plan.json"
    planned[0].save(path)
    data = json.loads(path.read_text())
    data[part] = [["nonsense"]] if part in ("ops", "collectives") else "nonsense"
    path.write_text(json.dumps(data))
    again = mw.Plan.load(path)
    with pytest.raises(mw.PlanFileError, match=f"damaged in its '{part}'.*save the plan again"):
        getattr(again, part)


@pytest.mark.parametrize("bound", [0.0, 1.0])
def test_the_gap_of_a_saved_plan_follows_from_its_cost_and_bound(tmp_path, bound):
    step, args = mlp_step(8, 8, layers=2)
    found = mw.plan(step, *args, mesh=mesh((2,)))
    found = replace(found, cost=Cost(1.0, 2.0), solution=SolutionSummary.proven(3.0, bound))
    assert found.solution.gap == (np.inf if bound == 0.0 else 2.0) and found.solution.status == "feasible"
    found.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert "Infinity" not in text
    loaded = mw.Plan.load(tmp_path / "plan.json")
    assert loaded.solution == found.solution
    (tmp_path / "older.json").write_text(text.replace('"gap": 2.0', '"gap": 0.66'))  # relative to the cost
    assert mw.Plan.load(tmp_path / "older.json").solution == found.solution
    words = "at most 200.00% above the lower bound 1" if bound else "no lower bound above 0 is known"
    assert gap_text(loaded) == words
