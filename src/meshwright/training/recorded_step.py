"""A pipelined step that was recorded, beside the one that was simulated."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.runtime.stages.recording import Event
from meshwright.simulator.simulation import Simulation
from meshwright.simulator.timeline import Interval
from meshwright.simulator.trace import line_events, simulation_events, write_trace
from meshwright.simulator.work import COMPUTE, TRANSFER
from meshwright.units import format_seconds


@dataclass(frozen=True)
class RecordedStep:
    """What the stages of this process did in one step; print it.

    Attributes:
        name: The function.
        events: What they did, in the order in which the host asked for it.
        simulation: The same step, simulated.
    """

    name: str
    events: tuple[Event, ...]
    simulation: Simulation

    @property
    def step_s(self) -> float:
        """The time of the step."""
        return max((event.end_s for event in self.events), default=0.0)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this process."""
        return tuple(sorted({event.stage for event in self.events}))

    def busy_s(self, stage: int) -> float:
        """For how long a stage computed."""
        return sum(e.end_s - e.start_s for e in self.events if e.stage == stage and not e.is_transfer)

    def save_trace(self, path: str | Path) -> None:
        """Writes both timelines as one trace that Perfetto (ui.perfetto.dev) and Chrome open."""
        recorded = [
            event
            for number, stage in enumerate(self.stages)
            for event in line_events(number, f"stage {stage}, recorded", self._intervals(stage))
        ]
        simulated = simulation_events(self.simulation, self.simulation.timeline, len(self.stages), ", simulated")
        write_trace(Path(path), [*recorded, *simulated])

    def _intervals(self, stage: int) -> Iterator[Interval]:
        for event in sorted((e for e in self.events if e.stage == stage), key=lambda e: e.start_s):
            yield Interval(TRANSFER if event.is_transfer else COMPUTE, event.name, event.start_s, event.end_s)

    def __str__(self) -> str:
        took, simulated = (format_seconds(seconds) for seconds in (self.step_s, self.simulation.step_s))
        lines = [f"A step of {self.name} took {took}; simulated, it takes {simulated}."]
        for stage in self.stages:
            own, other = self.busy_s(stage), self.simulation.timeline[stage].seconds(COMPUTE)
            shares = own / max(self.step_s, 1e-12), other / max(self.simulation.step_s, 1e-12)
            lines.append(
                f"Stage {stage} computed for {format_seconds(own)} ({shares[0]:.0%}); simulated, for "
                f"{format_seconds(other)} ({shares[1]:.0%})."
            )
        return "\n".join(lines)
