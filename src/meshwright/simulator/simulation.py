"""A simulated step: its figures, who did what when, and how it is shown and saved."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from meshwright.console import Printed
from meshwright.names import one_line
from meshwright.simulator.show import simulation_json, simulation_view
from meshwright.simulator.simulated_step import SimulatedStep
from meshwright.simulator.timeline import DeviceTimeline
from meshwright.simulator.trace import simulation_events, write_trace
from meshwright.units import format_bytes, format_seconds


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
