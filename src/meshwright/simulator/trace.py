"""Writes a simulation as a trace in the Trace Event Format, which Perfetto and Chrome read."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.output import write_whole
from meshwright.simulator.simulated_step import SimulatedStep
from meshwright.simulator.timeline import KINDS, DeviceTimeline, Interval

_US = 1e6  # the format counts microseconds
_MOST_TASKS = 300_000  # of a trace; beyond, whole passes are shown, as browsers open no larger files
_MOST_ROWS = 100  # of one kind


def save_trace(simulation: SimulatedStep, lines: Sequence[DeviceTimeline], path: Path) -> None:
    """Writes the trace atomically: the file is complete or absent."""
    data = {"displayTimeUnit": "ms", "traceEvents": list(_events(simulation, lines))}
    write_whole(path, json.dumps(data))


def _events(simulation: SimulatedStep, lines: Sequence[DeviceTimeline]) -> Iterator[dict[str, Any]]:
    num_tasks = sum(len(p.run.spans) for run in simulation.stages for p in run.passes)
    for number, line in enumerate(lines):
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"{line.name} × {line.num_devices}"}}
        named = set()
        for item, thread in _in_rows(line.intervals if num_tasks <= _MOST_TASKS else line.passes):
            if thread not in named:
                named.add(thread)
                yield {"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": item.kind}}
            yield {
                "ph": "X",
                "name": item.name or item.kind,
                "cat": item.kind,
                "pid": number,
                "tid": thread,
                "ts": item.start_s * _US,
                "dur": (item.end_s - item.start_s) * _US,
            }
        for when, size in simulation.memory[number]:
            yield {"ph": "C", "name": "memory", "pid": number, "ts": when * _US, "args": {"bytes": size}}


def _in_rows(intervals: Iterable[Interval]) -> Iterator[tuple[Interval, int]]:
    """Intervals, which come in order of their starts, with a thread in which they overlap no other."""
    ends: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for item in intervals:
        rows = ends[item.kind]
        row = next((i for i, end in enumerate(rows) if end <= item.start_s + 1e-12), len(rows))
        rows[row : row + 1] = [item.end_s]
        yield item, 1 + KINDS.index(item.kind) * _MOST_ROWS + row
