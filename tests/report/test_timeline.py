"""The timeline on the page: lanes that hold the simulation's tasks, in order, and few enough bars."""

from itertools import pairwise

import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.report.timeline import TICKS, WORK, Bar, joined, timeline_data
from meshwright.simulator.work import COLLECTIVE, COMPUTE
from tests.plans.test_stage import staged


@pytest.fixture(scope="module")
def program():
    example = zoo.build("gpt-tiny")
    args = (example.train_step, example.state, example.batch)
    return mw.plan(*args, cluster="1x4 h100", mesh=(4,), method=mw.DataParallel()).simulate()


def lanes_of(row):
    return {lane["name"]: lane["bars"] for lane in row["lanes"]}


def test_stages_keep_their_order():
    plan = staged(mw.cluster("2x4 h100"))
    shown = timeline_data(plan.simulate())
    first, second = (lanes_of(row)["compute"] for row in shown["rows"])
    about = [(WORK[work], shown["names"][name]) for _, _, name, work, _ in second]
    assert [work for work, _ in about][:4] == ["forward", "backward", "forward", "backward"]
    done = {(WORK[b[3]], shown["names"][b[2]]): b for b in first}
    sent = plan.stages[0].transfer_s / shown["step"] * TICKS
    for (work, name), bar in zip(about, second, strict=True):
        if work == "forward":
            assert bar[0] >= done[work, name][1] + sent - 2
    for bars in (first, second):
        assert len(bars) == 9 and WORK[bars[-1][3]] == "update"
        assert all(a[1] <= b[0] + 1 for a, b in pairwise(bars))


def test_lanes_hold_the_tasks_of_a_program(program):
    shown = timeline_data(program)
    (row,) = shown["rows"]
    lanes = lanes_of(row)
    assert row["name"] == "every device" and set(lanes) >= {"compute", "gradients"}
    tasks = [
        s.task for s in (*(s for p in program.stages[0].passes for s in p.run.spans), *program.stages[0].update.spans)
    ]
    for kind, names in (
        (COMPUTE, ["compute"]),
        (COLLECTIVE, [name for name in lanes if name not in ("compute", "exposed")]),
    ):
        assert sum(bar[4] for name in names for bar in lanes[name]) == sum(task.kind == kind for task in tasks) > 0
    busy = sum(bar[1] - bar[0] for bar in lanes["compute"]) / TICKS * shown["step"]
    assert busy == pytest.approx(program.timeline[0].seconds(COMPUTE), rel=0.02)


def test_communication_that_compute_waits_for_is_marked():
    example = zoo.build("gpt-tiny")
    args = (example.train_step, example.state, example.batch)
    plan = mw.plan(*args, cluster="1x4 h100", mesh=(4,), method=mw.Zero(3))
    (row,) = timeline_data(plan.simulate())["rows"]
    exposed, computing = (lanes_of(row)[name] for name in ("exposed", "compute"))
    waited = sum(bar[1] - bar[0] for bar in exposed) / TICKS * plan.step_s
    assert waited == pytest.approx(plan.cost.waiting, rel=0.02) and waited > 0
    assert all(stop <= a[0] + 1 or start >= a[1] - 1 for start, stop, *_ in exposed for a in computing if a[4] == 1)


def test_what_is_too_short_to_be_seen_is_joined():
    bars = [Bar(10 * i, 10 * i + 9 - i % 2, f"task {i}", "forward") for i in range(1000)]
    found = joined([*bars, Bar(10_000, 12_000, "long", "forward"), Bar(12_000, 12_001, "last", "update")], 100)
    assert len(found) < 120 and sum(bar.num for bar in found) == 1002
    assert all(bar.stop - bar.start <= 100 or bar.num == 1 for bar in found)
    assert found[0].name == "task 0" and [bar.name for bar in found[-2:]] == ["long", "last"]
