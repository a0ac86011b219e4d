"""Tests of stages as candidates of the default search."""

from functools import cache

import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.step_search.least_step import LeastStep


@cache
def step(name, **options):
    example = zoo.build(name, **options)
    return example.train_step, example.state, example.batch


def planned(pipeline, **options):
    """Wide layers on two hosts with slow links: their gradients take longer to send than what they hand on."""
    method = mw.Auto(pipeline=pipeline, **options)
    return mw.plan(*step("mlp", batch=1024, layers=4, hidden=4096), cluster="2x1 v100-32gb", method=method)


def test_stages_are_taken_where_they_are_quicker_by_more_than_a_percent():
    with_stages, without = planned("auto"), planned(False)
    assert with_stages.stages and not without.stages
    assert with_stages.step_s < 0.99 * without.step_s
    assert with_stages.step_s == pytest.approx(with_stages.simulate().step_s)
    longer = without.step_s / with_stages.step_s - 1
    said = f"It runs in stages: the best plan without any takes {longer:.1%} longer, as simulated."
    assert said in with_stages.remarks


def test_what_is_about_one_program_keeps_stages_out():
    assert not planned("auto", microbatches=2).stages
    assert not planned("auto", recompute="none").stages


def test_nothing_is_priced_where_devices_compute_all_the_time():
    told = []
    plan = mw.plan(*step("gpt-tiny", batch=16), cluster="1x4 h100", on_progress=told.append)
    assert not plan.stages and not [text for text in told if "stages" in text]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "stages, schedule, interleave", [(2, "1f1b", 1), (2, "zb-h1", 1), (2, "interleaved", 2), (4, "1f1b", 1)]
)
def test_a_bound_is_no_more_than_a_recipe_takes(stages, schedule, interleave):
    args, machine = step("llama-tiny", batch=64, seq=512, layers=4), mw.cluster("1x4 h100")
    least = LeastStep.of(mw.plan(*args, cluster=machine, method="zero3"), machine)
    for microbatch in (1, 4):
        recipe = mw.ThreeD(4 // stages, 1, stages, microbatch, schedule, interleave)
        plan = mw.plan(*args, cluster=machine, method=recipe)
        assert least.step_s(stages, plan.pipeline.num_microbatches, num_layers=6) <= plan.step_s


def test_more_microbatches_take_no_less_than_their_bound():
    args, machine = step("llama-tiny", batch=64, seq=512, layers=4), mw.cluster("1x4 h100")
    plans = [mw.plan(*args, cluster=machine, method=mw.Zero(3, microbatches=n)) for n in (2, 4)]
    bounds = [LeastStep.of(plans[0], machine).in_microbatches(n) for n in (2, 4)]
    assert bounds[0] < bounds[1] <= plans[1].step_s and bounds[0] <= plans[0].step_s


def test_stages_have_no_larger_microbatches_than_a_program_whose_state_is_spread():
    args, machine = step("gpt-tiny", batch=16), mw.cluster("1x4 h100")
    spread, whole = (
        LeastStep.of(mw.plan(*args, cluster=machine, method=method), machine)
        for method in (mw.Zero(3, microbatches=4), mw.DataParallel(microbatches=4))
    )
    assert spread.step_s(2, 4, num_layers=4) == float("inf")  # each device would have twice as many rows at once
    assert spread.step_s(2, 8, num_layers=4) < float("inf")
    assert whole.step_s(2, 4, num_layers=4) < float("inf")  # stages have less of the state, and room for more


def test_stages_that_would_have_parts_of_several_hosts_are_left_out():
    args = step("mlp", batch=1536, layers=4, hidden=2048)
    plan = mw.plan(*args, cluster="3x2 v100-32gb")  # three stages of a host each, but not two of a host and a half
    assert len(plan.stages) in (0, 3, 6)
