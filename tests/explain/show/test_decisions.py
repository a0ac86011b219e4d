"""What each decision about a whole step is worth, from the plans that the search made."""

from dataclasses import replace

import jax
import pytest

import meshwright as mw
from meshwright.plans.plan import Compared
from meshwright.report.data import page_data
from tests.explain.plans import tensor_parallel
from tests.step_search.test_microbatches import tight

OTHERS = (
    Compared("Zero-3", (4, 2), 1, "full", 0, 1.0, 2**30),
    Compared("Auto", (4, 2), 2, "as written", 2, 2.0, 2**30),
    Compared("Zero-1", (4, 2), 1, "as written", 0, 3.0, 2**30),
    Compared("Auto", (8,), 4, "none", 0, None, 2**40),
)


@pytest.fixture(scope="module")
def plan():
    return replace(tensor_parallel(), compared=OTHERS)


def test_each_decision_is_beside_the_quickest_plan_that_decides_otherwise(plan):
    found = {one.name: one.instead for one in plan.explain().decisions}
    assert found == {
        "microbatches": OTHERS[1],
        "recomputed": OTHERS[0],
        "stages": OTHERS[1],
        "splits": OTHERS[2],
    }


def test_it_prints_what_others_take_and_what_does_not_fit(plan):
    text = str(plan.explain())
    assert "Auto on 4×2, 2 stages, 2 microbatches" in text and "Zero-3 on 4×2, layers recomputed" in text
    line = next(line for line in text.splitlines() if line.startswith("Auto on 8, 4 microbatches"))
    assert "does not fit" in line and line.rstrip().endswith("≥ 1.00 TiB")
    assert str(tensor_parallel().explain()).count("none was looked into") == 4


@pytest.mark.parametrize("method, asked", [(mw.Auto(microbatches=1), 1), (mw.Zero(3, recompute="none"), 3)])
def test_what_was_asked_for_is_told_from_what_did_not_promise(method, asked, tmp_path):
    types = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
    mw.plan(lambda x, w: x @ w, *types, cluster="1x2 h100", method=method).save(tmp_path / "plan.json")
    plan = mw.Plan.load(tmp_path / "plan.json")
    assert sum(one.is_asked for one in plan.explain().decisions) == asked
    assert str(plan.explain()).count("it was asked for") == asked
    assert [one["without"] for one in page_data(plan, 0.0)["decided"]].count("it was asked for") == asked


def test_what_does_not_fit_is_told_of_a_step_in_microbatches(tmp_path):
    tight().save(tmp_path / "plan.json")
    plan = mw.Plan.load(tmp_path / "plan.json")
    (decision,) = [one for one in plan.explain().decisions if one.name == "microbatches"]
    assert decision.taken == str(plan.microbatches) and decision.instead is not None
    assert decision.instead.step_s is None and decision.instead.peak_bytes > plan.memory.limit_bytes
    shown = page_data(plan, 0.0)
    assert shown["decided"][0]["instead"]["step"] is None and len(shown["compared"]) == len(plan.compared)
    memory = shown["programs"][0]["timeline"]
    assert memory["num_parts"] == plan.microbatches and max(memory["part"]) == plan.microbatches - 1
    assert memory["at"] == sorted(set(memory["at"])) and memory["at"][-1] < memory["num_ops"]
