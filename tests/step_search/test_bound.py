"""Tests of the bound on whatever a step recomputes and however many microbatches it has, against enumeration."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.plans.text import gap_text
from meshwright.runtime.recomputation.policies import FULL, NONE, SELECTIVE


@cache
def step(name):
    example = zoo.build(name, batch=32, layers=2)
    return example.train_step, example.state, example.batch


@pytest.mark.sweep(1)
@pytest.mark.slow
@pytest.mark.parametrize("name, method", [("llama-tiny", mw.Zero(3)), ("gpt-tiny", mw.Auto())])
def test_no_plan_costs_less_whatever_is_recomputed_and_however_the_batch_is_cut(name, method):
    machine = mw.cluster("1x2 h100")
    plans = [
        mw.plan(*step(name), cluster=machine, mesh=(2,), method=replace(method, recompute=policy, microbatches=count))
        for policy, count in product((NONE, SELECTIVE, FULL), (1, 4))
    ]
    costs, bounds = [plan.cost.total for plan in plans], [plan.solution.of_any_program for plan in plans]
    assert 0 < max(bounds) <= min(costs)
    assert max(bounds) == pytest.approx(min(bounds), rel=1e-6)  # it is about the step, not about one of its programs


def test_the_bound_is_printed_where_another_program_than_the_written_one_is_planned():
    plan = mw.plan(*step("gpt-tiny"), cluster="1x2 h100", method=mw.Zero(3, microbatches=4, recompute=FULL))
    assert " for this program; with other recomputation or microbatches no plan costs less than " in gap_text(plan)
    assert "other recomputation" not in gap_text(replace(plan, microbatches=1, recompute=NONE))


def test_the_bound_is_kept_in_plan_files(tmp_path):
    plan = mw.plan(*step("gpt-tiny"), cluster="1x2 h100", method=mw.Zero(3, microbatches=4))
    plan.save(tmp_path / "plan.json")
    kept = mw.Plan.load(tmp_path / "plan.json").solution.of_any_program
    assert kept == plan.solution.of_any_program > 0
