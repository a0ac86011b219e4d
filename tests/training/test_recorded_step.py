"""A recorded step computes the same, and its timeline keeps to the order in which values flow."""

import json
import re

import jax
import numpy as np
import pytest

import meshwright as mw
from tests.runtime.stages.models import build

pytestmark = pytest.mark.devices


@pytest.fixture(scope="module")
def recorded():
    """The function, a step that was recorded, the results of it and those of one that was not."""
    init, train_step, batch = build()
    step = mw.parallelize(train_step, method=mw.ThreeD(pipeline=2, microbatch=4), cluster="1x2 cpu")
    state = lambda: mw.create_state(init, jax.random.key(0), like=step, example=(batch,))  # noqa: E731
    plain = step(state(), batch)
    result, found = step.trace(state(), batch)
    again = step(state(), batch)
    return step, found, result, (plain, again)


def test_recording_changes_no_number(recorded):
    _, _, result, others = recorded
    for other in others:
        for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_no_program_begins_before_the_one_before_it_on_its_stage_has_ended(recorded):
    step, found, *_ = recorded
    assert len(found.events) == len(step.recent.engine.bound), "this process has both ends of all transfers"
    for stage in found.stages:
        end = 0.0
        for event in (e for e in found.events if e.stage == stage and not e.is_transfer):
            assert end <= event.start_s <= event.end_s <= found.step_s
            end = event.end_s
        assert 0 < found.busy_s(stage) <= found.step_s


def test_it_is_printed_and_written_beside_the_simulated_step(recorded, tmp_path):
    _, found, *_ = recorded
    lines = str(found).splitlines()
    assert lines[0].startswith("A step of train_step took ") and "; simulated, it takes " in lines[0]
    assert [line.split(" computed ")[0] for line in lines[1:]] == ["Stage 0", "Stage 1"]
    found.save_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names[:2] == ["stage 0, recorded", "stage 1, recorded"]
    assert [name.split(" × ")[0] for name in names[2:]] == ["stage 0", "stage 1"]
    assert all(name.endswith(", simulated") for name in names[2:])
    bars = [event for event in events if event["ph"] == "X" and event["pid"] < 2]
    assert len(bars) == len(found.events) and all(bar["dur"] >= 0 for bar in bars)


def test_it_is_shown_under_the_simulated_step_on_the_page(recorded, tmp_path):
    step, found, *_ = recorded
    step.last_plan.report(tmp_path / "page.html", seconds=0, recorded=found.events)
    data = json.loads(re.search(r'<script [^>]*id="data"[^>]*>(.*?)</script>', (tmp_path / "page.html").read_text())[1])
    [plan] = data["plans"]
    shown, simulated = plan["recorded"], plan["timeline"]
    assert shown["kind"] == "recorded" and shown["step"] == found.step_s
    assert [row["name"] for row in shown["rows"]] == [row["name"] for row in simulated["rows"]]
    bars = [bar for row in shown["rows"] for lane in row["lanes"] for bar in lane["bars"]]
    assert sum(bar[4] for bar in bars) == len(found.events) and max(bar[1] for bar in bars) == shown["ticks"]
    with pytest.raises(mw.ShardingError, match="events of other stages than the plan's, which has 2 stages"):
        step.last_plan.report(tmp_path / "page.html", recorded=[found.events[0]._replace(stage=2)])


def test_a_step_that_is_one_program_is_not_recorded():
    step = mw.parallelize(lambda w, x: (w - x.sum(), x.max()), cluster="1x8 cpu", method=mw.DataParallel())
    with pytest.raises(mw.ShardingError, match=r"runs as one program; jax\.profiler\.trace shows"):
        step.trace(np.float32(0), np.ones((8, 2), np.float32))
