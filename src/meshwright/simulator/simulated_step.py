"""The result of a simulation as data: times, rates and memory of one step."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.schedules import Step
from meshwright.schedules.base import FORWARD
from meshwright.schedules.instructions import Instruction
from meshwright.simulator.lanes import Timeline
from meshwright.simulator.work import COMPUTE, Work


class Pass(NamedTuple):
    """One step of a stage's row, placed in time.

    Attributes:
        step: The entry of the schedule.
        start_s, end_s: When it ran; its transfers in the background may end later.
        run: The tasks inside it, timed from its start.
        ready_s: When its input had arrived.
    """

    step: Step
    start_s: float
    end_s: float
    run: Timeline
    ready_s: float


class Sent(NamedTuple):
    """A transfer to another stage, placed in time.

    Attributes:
        instruction: The instruction.
        start_s, end_s: When it was sent.
    """

    instruction: Instruction
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StageRun:
    """One stage, that is one class of devices, through a step.

    Attributes:
        passes: Its passes, in order.
        done_s: When its last pass ended.
        update_s: When all stages began to update.
        update: The update's tasks, timed from there.
        sends: Its transfers to other stages.
        frees: When it frees the activations of a microbatch, and of which virtual stage.
    """

    passes: tuple[Pass, ...]
    done_s: float
    update_s: float
    update: Timeline
    sends: tuple[Sent, ...] = ()
    frees: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True)
class SimulatedStep:
    """The figures of a simulated step.

    Attributes:
        work: The simulated work.
        step_s: Time of one step.
        stages: The classes of devices.
    """

    work: Work
    step_s: float
    stages: tuple[StageRun, ...]

    @property
    def busy_s(self) -> float:
        """How long the device that computes longest does so."""
        return max(sum(map(_computing_s, [*(one.run for one in run.passes), run.update])) for run in self.stages)

    @property
    def tflops_per_device(self) -> float:
        """The model's own FLOPs, in 10¹² a second and device; recomputation does not count."""
        return self.work.model_flops / self.step_s / self.work.num_devices / 1e12 if self.step_s > 0 else 0.0

    @property
    def mfu(self) -> float:
        """The model's FLOPs as a fraction of the devices' peak."""
        return self.tflops_per_device * 1e12 / self.work.peak_flops if self.work.peak_flops > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens (examples, where there are none) that the whole cluster trains on in a second."""
        return self.work.tokens / self.step_s if self.step_s > 0 else 0.0

    @property
    def peak_bytes(self) -> float:
        """The most memory that any device needs."""
        return max(self.stage_peak_bytes)

    @cached_property
    def stage_peak_bytes(self) -> tuple[float, ...]:
        """The same for each class of devices."""
        return tuple(max(size for _, size in series) for series in self.memory)

    @property
    def limit_bytes(self) -> float:
        """The memory of the device that needs the most."""
        return self.work.limit_bytes[self.stage_peak_bytes.index(self.peak_bytes)]

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return all(size <= limit for size, limit in zip(self.stage_peak_bytes, self.work.limit_bytes, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """Part of the step, over all stages, in which a stage waits for another one."""
        whole = sum(run.update_s for run in self.stages)
        busy = sum(p.end_s - p.start_s for run in self.stages for p in run.passes)
        tail = sum(max(0.0, _exchanged_s(run) - run.done_s) for run in self.stages)
        return max(0.0, whole - busy - tail) / (len(self.stages) * self.step_s) if self.step_s > 0 else 0.0

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each class of devices, memory over time: pairs of a second and the bytes from then on."""
        return tuple(tuple(memory_over_time(self.work, run, stage)) for stage, run in enumerate(self.stages))


def _computing_s(run: Timeline) -> float:
    return sum(span.end_s - span.start_s for span in run.spans if span.task.kind == COMPUTE)


def _exchanged_s(run: StageRun) -> float:
    return max((p.start_s + p.run.end_s for p in run.passes), default=0.0)


def memory_over_time(work: Work, run: StageRun, stage: int) -> Iterator[tuple[float, float]]:
    """Memory of a stage's devices: its state, activations of microbatches in flight, and temporaries.

    Where tasks state the memory that they run in, that figure is used.
    """
    told = [(p.start_s + s.start_s, s.task.live_bytes) for p in run.passes for s in p.run.spans if s.task.live_bytes]
    told += [(run.update_s + s.start_s, s.task.live_bytes) for s in run.update.spans if s.task.live_bytes]
    if told:
        yield from [(0.0, work.state_bytes[stage]), *sorted(told)]
        return
    changes: list[tuple[float, float]] = []
    for p in run.passes:
        chunk = work.chunks[p.step.chunk * work.num_stages + stage]
        changes += [(p.start_s, chunk.working_bytes), (p.end_s, -chunk.working_bytes)]
        if p.step.work == FORWARD and work.schedule != "inference":
            changes.append((p.start_s, chunk.activation_bytes))
    if work.schedule != "inference":
        changes += [(when, -work.chunks[chunk].activation_bytes) for when, chunk in run.frees]
    size = work.state_bytes[stage]
    yield 0.0, size
    for when, change in sorted(changes):  # at equal times, memory is freed before it is taken
        size += change
        yield when, size
