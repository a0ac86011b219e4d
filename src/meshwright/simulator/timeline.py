"""The timeline of a class of devices over a step, as intervals."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.simulator.lanes import Timeline
from meshwright.simulator.simulated_step import SimulatedStep
from meshwright.simulator.work import COLLECTIVE, COMPUTE, TRANSFER

IDLE = "idle"
KINDS = (COMPUTE, COLLECTIVE, TRANSFER, IDLE)


class Interval(NamedTuple):
    """One activity of a device.

    Attributes:
        kind: ``"compute"``, ``"collective"``, ``"transfer"`` or ``"idle"``.
        name: Its name.
        start_s, end_s: Its start and end.
    """

    kind: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class DeviceTimeline:
    """The activities of each device of a class over a step.

    Attributes:
        simulation: The simulation it belongs to.
        stage: Which of its stages.
    """

    simulation: SimulatedStep
    stage: int

    @property
    def name(self) -> str:
        """The class, e.g. ``"stage 3"``."""
        return f"stage {self.stage}" if len(self.simulation.stages) > 1 else "every device"

    @property
    def num_devices(self) -> int:
        """How many devices are alike."""
        return self.simulation.work.devices[self.stage]

    @cached_property
    def intervals(self) -> tuple[Interval, ...]:
        """Every task and transfer in order of their starts; ``idle`` is where nothing is computed."""
        return self._complete([*self._tasks(), *self._sent()])

    @cached_property
    def passes(self) -> tuple[Interval, ...]:
        """The same by whole passes instead of tasks."""
        run = self.simulation.stages[self.stage]
        intervals = [
            Interval(COMPUTE, f"{p.step.work}{self._about(p.step.microbatch, p.step.chunk)}", p.start_s, p.end_s)
            for p in run.passes
        ]
        intervals.append(Interval(COMPUTE, "update", run.update_s, run.update_s + run.update.end_s))
        return self._complete([*intervals, *self._sent()])

    def seconds(self, kind: str) -> float:
        """Time in which any activity of a kind runs; each kind of pass is examined once, however often it runs."""
        run = self.simulation.stages[self.stage]
        if kind == IDLE:
            return self.simulation.step_s - self.seconds(COMPUTE)
        if kind == TRANSFER:
            return sum(item.end_s - item.start_s for item in self._sent())
        runs = {id(p.run): p.run for p in run.passes}
        counts = Counter(id(p.run) for p in run.passes)
        passes = sum(count * _busy_s(runs[key], kind) for key, count in counts.items())
        return passes + _busy_s(run.update, kind)

    def _complete(self, found: list[Interval]) -> tuple[Interval, ...]:
        """Adds the idle intervals, and sorts."""
        now = 0.0
        for busy in sorted((i for i in found if i.kind == COMPUTE), key=lambda i: i.start_s):
            if busy.start_s > now + 1e-9:
                found.append(Interval(IDLE, "", now, busy.start_s))
            now = max(now, busy.end_s)
        if self.simulation.step_s > now + 1e-9:
            found.append(Interval(IDLE, "", now, self.simulation.step_s))
        return tuple(sorted(found, key=lambda i: (i.start_s, i.end_s)))

    def _tasks(self) -> Iterator[Interval]:
        run = self.simulation.stages[self.stage]
        for p in run.passes:
            about = self._about(p.step.microbatch, p.step.chunk)
            for task, start, end in p.run.spans:
                name = f"{p.step.work} {task.name}{about}"
                yield Interval(task.kind, name, p.start_s + start, p.start_s + end)
        for task, start, end in run.update.spans:
            yield Interval(task.kind, f"update {task.name}", run.update_s + start, run.update_s + end)

    def _sent(self) -> Iterator[Interval]:
        """Transfers to other stages."""
        count = self.simulation.work.num_stages
        for one, start, end in self.simulation.stages[self.stage].sends:
            about = self._about(one.microbatch, one.chunk // count)
            yield Interval(TRANSFER, f"send {one.work}{about}", start, end)

    def _about(self, microbatch: int, chunk: int) -> str:
        work = self.simulation.work
        about = f" · microbatch {microbatch}" if work.num_microbatches > 1 or len(work.chunks) > 1 else ""
        return about + (f", chunk {chunk}" if work.interleave > 1 else "")


def _busy_s(run: Timeline, kind: str) -> float:
    """Time in which at least one task of a kind runs."""
    total = until = 0.0
    for start, end in sorted((s.start_s, s.end_s) for s in run.spans if s.task.kind == kind):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
