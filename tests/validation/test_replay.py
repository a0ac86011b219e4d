"""Plans of published rows are simulated with the model of kernels, overlap and contention that recipes have."""

import pytest

from meshwright.simulator.engine import simulate_work
from meshwright.validation.plan_table import PlanValidation
from meshwright.validation.replay_plans import plan_layers, plan_work, replay_plans
from tests.validation.test_express import express, row

pytestmark = pytest.mark.slow

WIDE = {"hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "32000", "seq": "2048"}


@pytest.fixture(scope="module")
def large():
    """A row that is bound by products, as published ones are."""
    return next(replay_plans([row(**WIDE, notes="torch.compile")]))


@pytest.mark.slow
def test_plan_and_recipe_agree(large):
    assert not large.problem and large.method == "Zero-3"
    assert abs(large.difference) < 0.06
    assert large.error == pytest.approx(large.step_s - 1)  # one second is published


def test_a_step_is_as_many_microbatches_as_were_run():
    program = express(row())
    found = plan_layers(program, 4)
    twice = simulate_work(plan_work(found, program, 4))
    assert len(twice.stages[0].passes) == 4
    assert twice.work.tokens == 32 * 512


def test_microbatches_without_zero_3_exchange_gradients_once():
    program = express(row(zero_stage="1"))
    chunk = plan_work(plan_layers(program, 2), program, 2).chunks[0]
    lanes = [{task.lane for task in tasks} for tasks in (chunk.backward, chunk.closing)]
    assert "gradients" not in lanes[0] and "gradients" in lanes[1]
    assert chunk.backward[-1].name == "accumulate gradients"


def test_rows_without_a_plan_say_why_and_the_table_counts_the_others(large):
    others = list(replay_plans([row(cp="2", row_id=name) for name in ("near", "far")]))
    others += list(replay_plans([row(hidden="", row_id="odd")]))
    found = PlanValidation((large, *others))
    assert found.expressed == (large,)
    text = str(found)
    assert "3 rows without a plan" in text and "hidden is ''" in text
    counts = found.to_json()["left_out"]
    assert counts.pop("context parallelism has no method") == 2 and list(counts.values()) == [1]
    assert "near, far" in text
    mean, within, apart = found.targets
    assert (mean.count, mean.value) == (1, pytest.approx(abs(large.error)))
    assert apart.reached is not None and within.least
    assert [one["problem"] == "" for one in found.to_json()["rows"]] == [True, False, False, False]


@pytest.mark.slow
def test_pipelines_are_planned_in_stages_and_simulated():
    """A model whose layers take most of the time: its recipe and its plan agree."""
    staged = row(**WIDE, **{"pp": "2", "dp": "2", "tp": "2", "zero_stage": "0", "layers": "8", "global_batch": "16"})
    found = next(replay_plans([staged]))
    assert not found.problem and found.method == "ThreeD(2×2×2)"
    assert abs(found.difference) < 0.15
