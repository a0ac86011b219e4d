"""What a simulation found: times, rates, memory, and who did what when."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.pipeline.schedules import Step
from meshwright.pipeline.schedules.base import BACKWARD, FORWARD, WEIGHTS
from meshwright.simulator.lanes import Run
from meshwright.simulator.work import COMPUTE, TRANSFER, Work

IDLE = "idle"


class Pass(NamedTuple):
    """One step of a stage's row, placed in time.

    Attributes:
        step: What it is.
        start_s, end_s: When it ran; what it sends in the background may end later.
        run: The tasks inside it, timed from its start.
        ready_s: When its input had arrived.
    """

    step: Step
    start_s: float
    end_s: float
    run: Run
    ready_s: float


class Interval(NamedTuple):
    """What a device does at some time.

    Attributes:
        kind: ``"compute"``, ``"collective"``, ``"transfer"`` or ``"idle"``.
        name: What it is.
        start_s, end_s: When.
    """

    kind: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StageRun:
    """One stage, that is one class of devices, through a step.

    Attributes:
        passes: What it did, in order.
        done_s: When its last pass ended.
        update_s: When all stages began to update.
        update: The update's tasks, timed from there.
    """

    passes: tuple[Pass, ...]
    done_s: float
    update_s: float
    update: Run


@dataclass(frozen=True)
class DeviceTimeline:
    """What each device of a class does over a step.

    Attributes:
        name: The class, e.g. ``"stage 3"``.
        num_devices: How many devices are alike.
        intervals: In order of their starts; ``idle`` is where nothing is computed.
    """

    name: str
    num_devices: int
    intervals: tuple[Interval, ...]

    def seconds(self, kind: str) -> float:
        """Time spent on one kind."""
        return sum(i.end_s - i.start_s for i in self.intervals if i.kind == kind)


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Attributes:
        work: What was simulated.
        step_s: Time of one step.
        stages: The classes of devices.
    """

    work: Work
    step_s: float
    stages: tuple[StageRun, ...]

    @property
    def tflops_per_device(self) -> float:
        """The model's own FLOPs, in 10¹² a second and device; recomputation does not count."""
        return self.work.model_flops / self.step_s / self.work.num_devices / 1e12 if self.step_s > 0 else 0.0

    @property
    def mfu(self) -> float:
        """Those FLOPs as part of the devices' peak."""
        return self.tflops_per_device * 1e12 / self.work.peak_flops if self.work.peak_flops > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens (examples, where there are none) that the whole cluster trains on in a second."""
        return self.work.tokens / self.step_s if self.step_s > 0 else 0.0

    @property
    def peak_bytes(self) -> float:
        """The most memory that any device needs."""
        return max(max(size for _, size in series) for series in self.memory)

    @property
    def fits(self) -> bool:
        """Whether that is there."""
        return self.peak_bytes <= self.work.limit_bytes

    @property
    def bubble_fraction(self) -> float:
        """Part of the step, over all stages, in which a stage waits for another one."""
        whole = sum(run.update_s for run in self.stages)
        busy = sum(p.end_s - p.start_s for run in self.stages for p in run.passes)
        tail = sum(max(0.0, _exchanged_s(run) - run.done_s) for run in self.stages)
        return max(0.0, whole - busy - tail) / (len(self.stages) * self.step_s) if self.step_s > 0 else 0.0

    @cached_property
    def timeline(self) -> tuple[DeviceTimeline, ...]:
        """For each class of devices, what they do when."""
        return tuple(
            DeviceTimeline(self._class_name(i), self.work.devices[i], tuple(self._intervals(i)))
            for i in range(len(self.stages))
        )

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each class of devices, memory over time: from that second on, so many bytes."""
        return tuple(tuple(self._memory(i)) for i in range(len(self.stages)))

    def save_trace(self, path: str | Path) -> None:
        """Writes the timeline as a trace that Perfetto (ui.perfetto.dev) and Chrome open."""
        from meshwright.simulator.trace import save_trace

        save_trace(self, Path(path))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        from meshwright.simulator.show import simulation_json

        return simulation_json(self)

    def __str__(self) -> str:
        from meshwright.simulator.show import simulation_text

        return simulation_text(self)

    def _class_name(self, stage: int) -> str:
        return f"stage {stage}" if len(self.stages) > 1 else "every device"

    def _intervals(self, stage: int) -> Iterator[Interval]:
        found = [Interval(s.task.kind, name, s.start_s, s.end_s) for name, s in self._spans(stage)]
        found += self._sent(stage)
        now = 0.0
        for busy in sorted((i for i in found if i.kind == COMPUTE), key=lambda i: i.start_s):
            if busy.start_s > now + 1e-9:
                found.append(Interval(IDLE, "", now, busy.start_s))
            now = max(now, busy.end_s)
        if self.step_s > now + 1e-9:
            found.append(Interval(IDLE, "", now, self.step_s))
        yield from sorted(found, key=lambda i: (i.start_s, i.end_s))

    def _spans(self, stage: int) -> Iterator[tuple[str, Any]]:
        """Every task of a stage with its name and its time in the step."""
        run = self.stages[stage]
        several = self.work.num_microbatches > 1 or len(self.work.chunks) > 1
        for p in run.passes:
            about = f" · microbatch {p.step.microbatch}" if several else ""
            about += f", chunk {p.step.chunk}" if self.work.interleave > 1 else ""
            for span in p.run.spans:
                name = f"{p.step.work} {span.task.name}{about}"
                yield name, span._replace(start_s=p.start_s + span.start_s, end_s=p.start_s + span.end_s)
        for span in run.update.spans:
            start = run.update_s
            yield f"update {span.task.name}", span._replace(start_s=start + span.start_s, end_s=start + span.end_s)

    def _sent(self, stage: int) -> Iterator[Interval]:
        """Transfers to other stages, by when they arrive."""
        num = len(self.stages)
        if num == 1:
            return
        for p in self.stages[stage].passes:
            virtual = p.step.chunk * num + stage
            target = virtual + {FORWARD: 1, BACKWARD: -1, WEIGHTS: 0}[p.step.work]
            if target != virtual and 0 <= target < len(self.work.chunks):
                end = p.end_s + self.work.send_s(virtual, target)
                yield Interval(TRANSFER, f"send {p.step.work} · microbatch {p.step.microbatch}", p.end_s, end)

    def _memory(self, stage: int) -> Iterator[tuple[float, float]]:
        num, work = len(self.stages), self.work
        apart = any(p.step.work == WEIGHTS for p in self.stages[stage].passes)
        changes: list[tuple[float, float]] = []
        for p in self.stages[stage].passes:
            chunk = work.chunks[p.step.chunk * num + stage]
            changes += [(p.start_s, chunk.working_bytes), (p.end_s, -chunk.working_bytes)]
            if p.step.work == FORWARD and self.work.schedule != "inference":
                changes.append((p.start_s, chunk.activation_bytes))
            if p.step.work == (WEIGHTS if apart else BACKWARD):
                changes.append((p.end_s, -chunk.activation_bytes))
        size = work.state_bytes[stage]
        yield 0.0, size
        for when, change in sorted(changes, key=lambda c: (c[0], c[1])):  # what ends leaves before what begins comes
            size += change
            yield when, size


def _exchanged_s(run: StageRun) -> float:
    return max((p.start_s + p.run.end_s for p in run.passes), default=0.0)
