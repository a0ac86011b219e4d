"""Runs one device's tasks on its lanes: independent tasks overlap, and overlapping tasks slow each other down.

Each lane works off its tasks in order; a task begins when its lane is free and its dependencies are done. At any moment

    compute runs at 1 / (1 + contention) of its rate while something is being sent,
    n tasks on the same link run at 1/n of theirs.
"""

from math import isfinite
from typing import NamedTuple

from meshwright.errors import SimulationError
from meshwright.simulator.work import GRADIENTS, Task, Tasks


class Span(NamedTuple):
    """A task and when it ran."""

    task: Task
    start_s: float
    end_s: float


class Timeline(NamedTuple):
    """Tasks that were run.

    Attributes:
        spans: Each task with its time, in the order of their ends.
        own_s: When everything was done but the exchange of gradients.
        end_s: When everything was done.
    """

    spans: tuple[Span, ...]
    own_s: float
    end_s: float


def run(tasks: Tasks, contention: float) -> Timeline:
    """Runs tasks from time zero.

    Raises:
        SimulationError: A task takes no finite time.
    """
    endless = next((task for task in tasks if not isfinite(task.seconds)), None)
    if endless is not None:
        raise SimulationError(
            f"{endless.name!r:.60} takes {endless.seconds} s: figures of the plan or of its chips are out of range"
        )
    queues: dict[str, list[int]] = {}
    for place, task in enumerate(tasks):
        queues.setdefault(task.lane, []).append(place)
    heads = dict.fromkeys(queues, 0)
    done = bytearray(len(tasks))
    active: dict[int, list[float]] = {}  # place: [seconds of work left, start]
    spans: list[Span] = []
    now = own_s = 0.0
    while True:
        for lane, queue in queues.items():
            head = heads[lane]
            if head < len(queue) and queue[head] not in active:
                task = tasks[queue[head]]
                if all(done[n] for n in task.needs):
                    active[queue[head]] = [task.seconds, now]
        if not active:
            break
        rates = _rates(tasks, active, contention)
        step = min(left / rate for (left, _), rate in zip(active.values(), rates, strict=True))
        now += step
        for place, rate in zip(tuple(active), rates, strict=True):
            entry = active[place]
            entry[0] -= step * rate
            if entry[0] <= 1e-12:
                del active[place]
                done[place] = 1
                heads[tasks[place].lane] += 1
                spans.append(Span(tasks[place], entry[1], now))
                if tasks[place].lane != GRADIENTS:
                    own_s = now
    assert len(spans) == len(tasks), "tasks that wait for each other"
    return Timeline(tuple(spans), own_s, now)


def _rates(tasks: Tasks, active: dict[int, list[float]], contention: float) -> list[float]:
    if len(active) == 1:
        return [1.0]
    on_link: dict[str, int] = {}
    for place in active:
        if tasks[place].link:
            on_link[tasks[place].link] = on_link.get(tasks[place].link, 0) + 1
    slowed = 1 / (1 + contention) if on_link else 1.0
    return [1 / on_link[tasks[p].link] if tasks[p].link else slowed for p in active]
