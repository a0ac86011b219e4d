"""Writes a simulation as a trace in the Trace Event Format, which Perfetto and Chrome read."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.simulator.simulation import Simulation

_US = 1e6  # the format counts microseconds
_THREADS = {"compute": 1, "collective": 2, "transfer": 3, "idle": 4}


def save_trace(simulation: Simulation, path: Path) -> None:
    """Writes the trace; the file is complete or not there at all."""
    data = {"displayTimeUnit": "ms", "traceEvents": list(_events(simulation))}
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(data), encoding="utf-8")
    scratch.replace(path)


def _events(simulation: Simulation) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(simulation.timeline):
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"{line.name} × {line.num_devices}"}}
        for kind, thread in _THREADS.items():
            yield {"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": kind}}
        for item in line.intervals:
            yield {
                "ph": "X",
                "name": item.name or item.kind,
                "cat": item.kind,
                "pid": number,
                "tid": _THREADS[item.kind],
                "ts": item.start_s * _US,
                "dur": (item.end_s - item.start_s) * _US,
            }
        for when, size in simulation.memory[number]:
            yield {"ph": "C", "name": "memory", "pid": number, "ts": when * _US, "args": {"bytes": size}}
