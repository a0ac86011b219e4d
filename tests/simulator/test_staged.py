"""Pipelined plans are simulated: schedules, memory, saved plans, other machines."""

from dataclasses import replace

import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.simulator.staged import staged_work


@pytest.fixture(scope="module")
def example():
    return zoo.build("gpt2-125m", batch=32, seq=128, layers=4)


def planned(example, **options):
    settings = {"data": 2, "tensor": 1, "pipeline": 4, "microbatch": 2} | options
    return mw.plan(
        example.train_step, example.state, example.batch, cluster="2x4 a100-40gb", method=mw.ThreeD(**settings)
    )


@pytest.fixture(scope="module")
def plan(example):
    return planned(example)


def test_stages_are_classes_of_devices(plan):
    found = plan.simulate()
    assert [line.name for line in found.timeline] == [f"stage {i}" for i in range(4)]
    assert sum(line.num_devices for line in found.timeline) == 8
    assert 0 < found.bubble_fraction < 1
    assert any(item.kind == "transfer" for item in found.timeline[0].intervals)


def test_a_step_takes_no_less_than_its_slowest_stage(plan):
    slowest = max(s.microbatch_s for s in plan.stages) * plan.pipeline.num_microbatches
    assert plan.simulate().step_s > slowest


def test_memory_follows_the_schedule(plan):
    found = plan.simulate()
    for stage, series in zip(plan.stages, found.memory, strict=True):
        assert max(size for _, size in series) == pytest.approx(stage.peak_bytes, rel=0.1)


def test_zero_bubble_fills_what_1f1b_leaves(example, plan):
    assert planned(example, schedule="zb-h1").simulate().bubble_fraction < plan.simulate().bubble_fraction


def test_a_loaded_plan_is_simulated_alike(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert mw.Plan.load(tmp_path / "plan.json").simulate().step_s == plan.simulate().step_s


def test_stages_move_to_machines_of_the_same_sizes(plan):
    assert mw.simulate(plan, cluster="2x4 h100").step_s < plan.simulate().step_s
    with pytest.raises(mw.SimulationError, match="not as many or as large"):
        mw.simulate(plan, cluster="1x8 h100")


def test_sends_move_with_the_wires_that_they_use(plan):
    """Stages 0 and 1 share a host, 1 and 2 do not; the other machines differ in what joins hosts alone."""
    other = mw.cluster("2x4 a100-40gb")
    slower = replace(other.host, inter=replace(other.inter, bandwidth=other.inter.bandwidth / 2))
    before, after = (staged_work(plan, where).chunks for where in (other, replace(other, host=slower)))
    assert [b.send_s / a.send_s for a, b in zip(before[:2], after[:2], strict=True)] == pytest.approx([1, 2])
