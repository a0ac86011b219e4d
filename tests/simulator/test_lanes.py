"""Tasks on lanes: bounds that hold for any tasks, and what sharing and contention cost exactly."""

import random

import pytest

from meshwright.simulator.lanes import run
from meshwright.simulator.work import COLLECTIVE, COMPUTE, Task


def random_tasks(rng, count):
    tasks = []
    for place in range(count):
        compute = rng.random() < 0.5
        lane = "compute" if compute else rng.choice(["tensor", "data"])
        needs = tuple(sorted(rng.sample(range(place), min(place, rng.randrange(3)))))
        seconds = rng.choice([0.0, rng.random()])
        kind, link = (COMPUTE, "") if compute else (COLLECTIVE, rng.choice(["inside", "across"]))
        tasks.append(Task(f"t{place}", kind, lane, seconds, link, needs))
    return tuple(tasks)


def critical_path(tasks):
    """The longest chain of needs and lane orders."""
    end, lanes = [], {}
    for task in tasks:
        start = max([end[n] for n in task.needs] + [lanes.get(task.lane, 0.0)])
        end.append(start + task.seconds)
        lanes[task.lane] = end[-1]
    return max(end, default=0.0)


@pytest.mark.parametrize("seed", range(60))
def test_any_tasks_keep_their_order_and_take_no_less_than_their_longest_chain(seed):
    rng = random.Random(seed)
    tasks = random_tasks(rng, rng.randrange(1, 25))
    done = run(tasks, contention=0.0)
    spans = {id(span.task): span for span in done.spans}
    assert len(spans) == len(tasks)
    lanes = {}
    for task in tasks:
        span = spans[id(task)]
        assert span.end_s - span.start_s >= task.seconds - 1e-9
        assert all(spans[id(tasks[n])].end_s <= span.start_s + 1e-9 for n in task.needs)
        assert lanes.get(task.lane, 0.0) <= span.start_s + 1e-9
        lanes[task.lane] = span.end_s
    assert critical_path(tasks) - 1e-9 <= done.end_s <= sum(t.seconds for t in tasks) + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_contention_costs_at_most_its_share_of_compute(seed):
    tasks = random_tasks(random.Random(seed), 20)
    compute = sum(t.seconds for t in tasks if t.kind == COMPUTE)
    for contention in (0.2, 1.0):
        assert run(tasks, contention).end_s <= sum(t.seconds for t in tasks) + contention * compute + 1e-9


def test_without_needs_lanes_overlap_wholly():
    tasks = (Task("a", COMPUTE, "compute", 3.0), Task("b", COLLECTIVE, "data", 2.0, "inside"))
    assert run(tasks, 0.0).end_s == pytest.approx(3.0)


def test_compute_runs_slower_while_something_is_sent():
    tasks = (Task("a", COMPUTE, "compute", 3.0), Task("b", COLLECTIVE, "data", 2.0, "inside"))
    # Two seconds at 1/1.5 of the rate do 4/3 of the work; the rest takes its own time.
    assert run(tasks, 0.5).end_s == pytest.approx(2.0 + (3.0 - 2.0 / 1.5))


def test_tasks_on_one_link_share_it():
    tasks = (Task("a", COLLECTIVE, "x", 1.0, "inside"), Task("b", COLLECTIVE, "y", 3.0, "inside"))
    assert [span.end_s for span in run(tasks, 0.0).spans] == pytest.approx([2.0, 4.0])


def test_tasks_on_two_links_do_not():
    tasks = (Task("a", COLLECTIVE, "x", 1.0, "inside"), Task("b", COLLECTIVE, "y", 3.0, "across"))
    assert run(tasks, 0.0).end_s == pytest.approx(3.0)


def test_no_tasks_take_no_time():
    assert run((), 0.3).end_s == 0.0
