"""What a run measures between two lines of its log: rates, utilisation, and where the time went."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import jax

from meshwright.facade import Plan
from meshwright.hardware.lookup import chips
from meshwright.simulator.spmd import peak_flops
from meshwright.units import format_seconds

_SLOW = 1.15  # times the planned step, from which a line says so


@dataclass(frozen=True)
class Planned:
    """What a plan says of one step.

    Attributes:
        step_s: Its time, by the simulator, which lets communication overlap with compute.
        model_flops: FLOPs of the model's products on all devices, without recomputation.
        peak_flops: Of all devices together, in the type of most products, by the chip's data sheet.
    """

    step_s: float
    model_flops: float
    peak_flops: float

    @classmethod
    def of(cls, plan: Plan) -> "Planned":
        simulated = plan.simulate()
        work = simulated.work
        return cls(simulated.step_s, work.model_flops, work.peak_flops * work.num_devices * _data_sheet(plan))


def _data_sheet(plan: Plan) -> float:
    """The peak of a chip's data sheet, to which everybody's MFU refers, over the plan's, which may be measured."""
    if jax.default_backend() == "cpu" or plan.mesh.cluster is None:  # the catalogue's CPU is a stand-in for all CPUs
        return 1.0
    chip = plan.mesh.cluster.chip
    sheet = next((known for known in chips() if known.name == chip.name), chip)
    return peak_flops(plan, sheet) / peak_flops(plan, chip)


class Meter:
    """Measures the steps of one run.

    `mark` is called where the devices have just finished; between two marks, `waiting` counts what was lost.
    """

    def __init__(self, planned: Planned, tokens: int):
        self._planned, self._tokens = planned, tokens
        self._lost = {"input": 0.0, "checkpoints": 0.0, "evaluation": 0.0, "log": 0.0}
        self._since = time.perf_counter()
        self._steps = 0

    def step(self) -> None:
        """One step was begun."""
        self._steps += 1

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Time in which the devices wait for something of the host."""
        begun = time.perf_counter()
        yield
        self._lost[what] += time.perf_counter() - begun

    def lose_input(self, seconds: float) -> None:
        self._lost["input"] += seconds

    def mark(self) -> dict[str, float]:
        """The figures since the last mark, none without a step; a step's time is without evaluation and checkpoints."""
        now = time.perf_counter()
        seconds, steps = now - self._since, self._steps
        lost = dict(self._lost)
        self._since, self._steps, self._lost = now, 0, dict.fromkeys(lost, 0.0)
        if not steps:
            return {}
        step_s = max(1e-9, (seconds - lost["checkpoints"] - lost["evaluation"]) / steps)
        figures = {
            "step_s": step_s,
            "planned_step_s": self._planned.step_s,
            "tokens_per_s": self._tokens / step_s,
            "mfu": self._planned.model_flops / step_s / self._planned.peak_flops if self._planned.peak_flops else 0.0,
            "input_s": lost["input"] / steps,
            "checkpoint_s": lost["checkpoints"] / steps,
            "log_s": lost["log"] / steps,
        }
        memory = _peak_bytes()
        return figures | ({"peak_bytes": float(memory)} if memory else {})


def _peak_bytes() -> int:
    """The most memory that any of this process's devices has used; 0 where they do not say."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((int(one.get("peak_bytes_in_use", 0)) for one in stats), default=0)


def slower_than_planned(figures: Mapping[str, float]) -> str | None:
    """A line on steps that take much longer than planned, and where the time goes; None where they do not."""
    step_s, planned = figures.get("step_s", 0.0), figures.get("planned_step_s", 0.0)
    if not planned or step_s < _SLOW * planned:
        return None
    extra = step_s - planned
    if (waited := figures["input_s"]) > extra / 2:
        where = f"{format_seconds(waited)} of it waiting for data: read ahead, or from a quicker disk"
    elif (said := figures["log_s"]) > extra / 2:
        where = (
            f"{format_seconds(said)} of it in writing the log and what on_log calls: log less often, or do less there"
        )
    else:
        where = "in the step on the devices: `meshwright rehearse` and a profile show which part"
    return (
        f"steps take {format_seconds(step_s)}, {step_s / planned - 1:.0%} more than the planned "
        f"{format_seconds(planned)}, {where}"
    )
