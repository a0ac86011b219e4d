"""A simulated step: its figures, who did what when, and how it is shown and saved."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Printed, Table
from meshwright.names import one_line
from meshwright.simulator.simulated_step import SimulatedStep
from meshwright.simulator.timeline import KINDS, DeviceTimeline
from meshwright.simulator.trace import simulation_events, write_trace
from meshwright.units import format_bytes, format_seconds

_MOST_ROWS = 12  # of a table of stages


@dataclass(frozen=True)
class Simulation(SimulatedStep, Printed):
    """A simulated step; print it. `SimulatedStep` has its figures."""

    @cached_property
    def timeline(self) -> tuple[DeviceTimeline, ...]:
        """For each class of devices, what they do when."""
        return tuple(DeviceTimeline(self, stage) for stage in range(len(self.stages)))

    def save_trace(self, path: str | Path) -> None:
        """Writes the timeline as a trace that Perfetto (ui.perfetto.dev) and Chrome open."""
        write_trace(Path(path), simulation_events(self, self.timeline))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return simulation_json(self, self.timeline)

    def __rich__(self) -> RenderableType:
        return simulation_view(self, self.timeline)

    def __repr__(self) -> str:
        where = f"{format_bytes(self.peak_bytes)} of {format_bytes(self.limit_bytes)}"
        return f"<Simulation: {one_line(self.work.name)}, step {format_seconds(self.step_s)}, {where}>"


def simulation_view(simulation: SimulatedStep, lines: Sequence[DeviceTimeline]) -> RenderableType:
    """The figures, and the activity of each class of devices."""
    work = simulation.work
    head = Text()
    head.append(f"{work.name}\n", style="bold")
    head.append(f"step {format_seconds(simulation.step_s)}")
    if work.model_flops > 0:
        head.append(f" · {simulation.tflops_per_device:.1f} TFLOP/s a device, {simulation.mfu:.1%} of peak")
    if work.tokens > 0:
        head.append(f" · {simulation.tokens_per_s:,.0f} {work.counted}/s")
    fits = "fits" if simulation.fits else "does not fit"
    head.append(f"\nmemory {format_bytes(simulation.peak_bytes)} of {format_bytes(simulation.limit_bytes)}: {fits}")
    if work.num_stages > 1:
        head.append(f" · {work.num_stages} stages, {work.num_microbatches} microbatches, {work.schedule}")
        head.append(f" · bubble {simulation.bubble_fraction:.1%}")
    return Group(head, Text(), _table(simulation, lines))


def _table(simulation: SimulatedStep, lines: Sequence[DeviceTimeline]) -> Table:
    table = Table(
        title="what devices do, as part of the step; collectives may run beside compute", title_justify="left"
    )
    for name in ("devices", "", *KINDS, "memory"):
        table.add_column(name, justify="left" if name == "devices" else "right")
    shown = _some(len(simulation.stages))
    for number, stage in enumerate(shown):
        if number and stage != shown[number - 1] + 1:
            table.add_row("…")
        line = lines[stage]
        parts = [f"{line.seconds(kind) / simulation.step_s:.1%}" if simulation.step_s else "0%" for kind in KINDS]
        peak = format_bytes(simulation.stage_peak_bytes[stage])
        table.add_row(line.name, f"× {line.num_devices}", *parts, peak)
    return table


def _some(count: int) -> list[int]:
    if count <= _MOST_ROWS:
        return list(range(count))
    half = _MOST_ROWS // 2
    return [*range(half), *range(count - half, count)]


def simulation_json(simulation: SimulatedStep, lines: Sequence[DeviceTimeline]) -> dict[str, Any]:
    """Plain data: the figures, and for each class of devices where its time goes."""
    return {
        "name": simulation.work.name,
        "step_s": simulation.step_s,
        "tflops_per_device": simulation.tflops_per_device,
        "mfu": simulation.mfu,
        "tokens_per_s": simulation.tokens_per_s,
        "peak_bytes": simulation.peak_bytes,
        "limit_bytes": simulation.limit_bytes,
        "fits": simulation.fits,
        "bubble_fraction": simulation.bubble_fraction,
        "num_devices": simulation.work.num_devices,
        "num_stages": simulation.work.num_stages,
        "num_microbatches": simulation.work.num_microbatches,
        "schedule": simulation.work.schedule,
        "devices": [_line_json(line) for line in lines],
    }


def _line_json(line: DeviceTimeline) -> dict[str, Any]:
    seconds = {f"{kind}_s": line.seconds(kind) for kind in KINDS}
    peak, limit = (sizes[line.stage] for sizes in (line.simulation.stage_peak_bytes, line.simulation.work.limit_bytes))
    return {
        "name": line.name,
        "num_devices": line.num_devices,
        **seconds,
        "peak_bytes": peak,
        "limit_bytes": limit,
    }
