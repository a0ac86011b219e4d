"""Models that meet what they do not expect: a plan is made without three of them, and says so; others are errors."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.fallback import STRICT, with_fallback
from meshwright.plan_files.storage import plan_from_json, plan_to_json
from meshwright.rules import registry

ROOT = Path(__file__).parents[1]
X, W = (jax.ShapeDtypeStruct((8, 8), jnp.float32) for _ in range(2))

# Where a model is called that a plan can do without, and how its remark begins.
MODELS = {
    "meshwright.planner.planner.liveness": "The model of fusion",
    "meshwright.planner.planner.proven": "The lower bound",
}
# Steps that a plan cannot do without.
NEEDED = [
    "meshwright.graph.tracing.call.pair_counted_indices",
    "meshwright.planner.grouping.groups.find_accumulated",
    "meshwright.planner.grouping.groups.find_joining",
    "meshwright.planner.grouping.groups.find_starts",
    "meshwright.planner.planner.fold",
]


def step(w, x):
    def body(carry, row):
        return carry + jnp.tanh(x @ w).T @ (x * row), None

    total, _ = jax.lax.scan(body, jnp.zeros((8, 8)), x)
    return w - total


def fails(*args, **kwargs):
    raise KeyError(30)


@pytest.mark.parametrize("place", MODELS)
def test_a_plan_is_made_without_a_model_that_fails_and_says_so(place, monkeypatch):
    monkeypatch.setattr(place, fails)
    with pytest.raises(KeyError):
        mw.plan(step, W, X, cluster="local", mesh=(8,))
    monkeypatch.setenv(STRICT, "0")
    plan = mw.plan(step, W, X, cluster="local", mesh=(8,))
    assert [remark.startswith(MODELS[place]) and "KeyError: 30" in remark for remark in plan.remarks] == [True]
    assert plan.memory.peak_bytes >= 2 * 8 * 8 * 4 / 8 and plan.solution.lower_bound >= 0
    assert "failed unexpectedly" in str(plan)


@pytest.mark.parametrize("place", NEEDED)
def test_what_else_fails_is_an_error(place, monkeypatch):
    monkeypatch.setattr(place, fails)
    monkeypatch.setenv(STRICT, "0")
    with pytest.raises(KeyError):
        mw.plan(step, W, X, cluster="local", mesh=(8,))


def test_a_search_for_stages_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr("meshwright.pipeline.planner.start_search", fails)
    monkeypatch.setenv(STRICT, "0")
    with pytest.raises(KeyError):
        mw.plan(step, W, X, cluster="1x4 a100-40gb", method=mw.Auto(pipeline=True))


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda file: file.stem)
def test_every_benchmark_that_plans_counts_a_model_that_fails_as_an_error(file):
    text = file.read_text(encoding="utf-8")
    sets = 'os.environ.setdefault("MESHWRIGHT_STRICT", "1")'
    assert (sets in text) == (file.stem == "report")
    assert "import report" in text or "from report import" in text or "mw.plan(" not in text


def test_nothing_is_left_out_of_an_ordinary_plan():
    assert mw.plan(step, W, X, cluster="local", mesh=(8,)).remarks == ()


def test_errors_of_the_user_are_not_taken_for_failures(monkeypatch):
    monkeypatch.setenv(STRICT, "0")

    def refuses():
        raise mw.ShardingError("no such axis")

    remarks: list[str] = []
    with pytest.raises(mw.ShardingError):
        with_fallback(remarks, "It", "nothing is done", refuses, dict)
    with pytest.raises(KeyError):
        with_fallback(None, "It", "nothing is done", fails, dict)
    assert with_fallback(remarks, "It", "nothing is done", fails, dict) == {}
    assert remarks == ["It failed unexpectedly (KeyError: 30) and was skipped: nothing is done."]


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
