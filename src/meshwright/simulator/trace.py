"""Writes what devices do when as a trace in the Trace Event Format, which Perfetto and Chrome read."""

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


Events = Iterator[dict[str, Any]]


def write_trace(path: Path, events: Iterable[dict[str, Any]]) -> None:
    """Writes a trace atomically: the file is complete or absent."""
    write_whole(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events)}))


def simulation_events(
    simulation: SimulatedStep, lines: Sequence[DeviceTimeline], first: int = 0, about: str = ""
) -> Events:
    """The events of a simulation, whose classes of devices are numbered from some number on."""
    num_tasks = sum(len(p.run.spans) for run in simulation.stages for p in run.passes)
    for number, (line, memory) in enumerate(zip(lines, simulation.memory, strict=True), first):
        intervals = line.intervals if num_tasks <= _MOST_TASKS else line.passes
        yield from line_events(number, f"{line.name} × {line.num_devices}{about}", intervals)
        for when, size in memory:
            yield {"ph": "C", "name": "memory", "pid": number, "ts": when * _US, "args": {"bytes": size}}


def line_events(number: int, name: str, intervals: Iterable[Interval]) -> Events:
    """The events of one class of devices, whose intervals come in order of their starts."""
    yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
    named = set()
    for item, thread in _in_rows(intervals):
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


def _in_rows(intervals: Iterable[Interval]) -> Iterator[tuple[Interval, int]]:
    """Intervals, which come in order of their starts, with a thread in which they overlap no other."""
    ends: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for item in intervals:
        rows = ends[item.kind]
        row = next((i for i, end in enumerate(rows) if end <= item.start_s + 1e-12), len(rows))
        rows[row : row + 1] = [item.end_s]
        yield item, 1 + KINDS.index(item.kind) * _MOST_ROWS + row
