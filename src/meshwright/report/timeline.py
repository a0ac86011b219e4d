"""A step for the page, simulated or recorded: for each class of devices lanes of compute and of communication.

Pages stay small: bars too short to be seen are merged with the next bars in their lane.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice, pairwise
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.parallelism.words import label_words
from meshwright.simulator.timeline import DeviceTimeline
from meshwright.simulator.work import COMPUTE, TRANSFER

if TYPE_CHECKING:
    from meshwright.runtime.stages.recording import Event
    from meshwright.simulator.lanes import Timeline
    from meshwright.simulator.simulated_step import Pass
from meshwright.simulator.simulation import Simulation

WORK = ("forward", "backward", "weights", "update")
TICKS = 1_000_000  # of a step: times are whole numbers of them
_BARS = 6000  # of all lanes together, about
_LANES = {COMPUTE: "compute", "collective": "collectives", "fetch": "fetches", "gradients": "gradients"}


class Bar(NamedTuple):
    """An activity in a lane.

    Attributes:
        start, stop: Its start and end, in ticks.
        name: Its name; of several merged ones, that of the longest.
        work: The kind of pass it belongs to: one of `WORK`.
        num: The number of merged activities.
        longest: Ticks of the longest of them.
    """

    start: int
    stop: int
    name: str
    work: str
    num: int = 1
    longest: int = 0


def timeline_data(simulated: "Simulation") -> dict[str, Any]:
    """The lanes of every class of devices of a simulated step."""
    lanes = [(row, lane, bars) for row in range(len(simulated.stages)) for lane, bars in _lanes(simulated, row)]
    rows = [{"name": line.name, "devices": line.num_devices} for line in simulated.timeline]
    return _shown("simulated", simulated.step_s, rows, lanes)


def recorded_data(events: Sequence["Event"], simulated: "Simulation") -> dict[str, Any]:
    """The lanes of the stages of a process whose step was recorded."""
    stages, step_s = sorted({event.stage for event in events}), max(event.end_s for event in events)
    lanes: dict[tuple[int, str], list[Bar]] = {}
    for event in events:
        start, stop = (round(TICKS * when / step_s) for when in (event.start_s, event.end_s))
        work = next((work for work in WORK if work in event.name), "update")
        lane = "transfers" if event.is_transfer else "compute"
        lanes.setdefault((stages.index(event.stage), lane), []).append(Bar(start, stop, event.name, work))
    lines = [simulated.timeline[stage] for stage in stages]
    rows = [{"name": line.name, "devices": line.num_devices} for line in lines]
    return _shown("recorded", step_s, rows, [(*key, bars) for key, bars in sorted(lanes.items())])


def _shown(
    kind: str, step_s: float, rows: Sequence[dict[str, Any]], lanes: Sequence[tuple[int, str, list[Bar]]]
) -> dict[str, Any]:
    """A timeline, names as numbers into a list."""
    least = TICKS * len(lanes) // _BARS
    names: dict[str, int] = {}
    rows = [row | {"lanes": []} for row in rows]
    for row, lane, bars in lanes:
        rectangles = [
            [b.start, b.stop, names.setdefault(b.name, len(names)), WORK.index(b.work), b.num]
            for b in joined(bars, least)
        ]
        rows[row]["lanes"].append({"name": lane, "bars": rectangles})
    return {"kind": kind, "step": step_s, "ticks": TICKS, "work": WORK, "names": list(names), "rows": rows}


def joined(bars: Iterable[Bar], least: int) -> list[Bar]:
    """Bars in the order of their starts; neighbours of one kind of pass that are shorter than ``least`` are merged."""
    merged: list[Bar] = []
    for bar in sorted(bars, key=lambda b: (b.start, b.stop)):
        size, last = bar.stop - bar.start, merged[-1] if merged else None
        if last is None or last.work != bar.work or bar.stop - last.start > least:
            merged.append(bar._replace(longest=size))
            continue
        name, longest = (bar.name, size) if size > last.longest else (last.name, last.longest)
        merged[-1] = Bar(last.start, max(last.stop, bar.stop), name, bar.work, last.num + 1, longest)
    return merged


def _lanes(simulated: "Simulation", row: int) -> Iterator[tuple[str, list[Bar]]]:
    """The non-empty lanes of one class of devices."""
    bars: dict[str, list[Bar]] = {name: [] for name in ("compute", "exposed", *_LANES.values(), "transfers")}
    scale, run, staged = TICKS / simulated.step_s, simulated.stages[row], len(simulated.stages) > 1
    for p in run.passes:
        for lane, bar in _bars(p.run, p.start_s, p.step.work, _pass_name(simulated, p) if staged else "", scale):
            bars[lane].append(bar)
        bars["exposed"] += _exposed(p.run, p.start_s, p.step.work, scale)
    for lane, bar in _bars(run.update, run.update_s, "update", "update" if staged else "", scale):
        bars[lane].append(bar)
    bars["exposed"] += _exposed(run.update, run.update_s, "update", scale)
    for item in DeviceTimeline(simulated, row).intervals if staged else ():
        if item.kind == TRANSFER:
            work = next(work for work in WORK if f"send {work}" in item.name)
            bars["transfers"].append(Bar(round(item.start_s * scale), round(item.end_s * scale), item.name, work))
    yield from ((lane, lane_bars) for lane, lane_bars in bars.items() if lane_bars)


def _bars(run: "Timeline", begin_s: float, work: str, name: str, scale: float) -> Iterator[tuple[str, Bar]]:
    """The tasks of a pass; with a name, its tasks in a lane without a pause are one bar."""
    for lane, spans in groupby(sorted(run.spans, key=lambda s: (s.task.lane, s.start_s)), lambda s: s.task.lane):
        last: Bar | None = None
        for span in spans:
            start, stop = (round((begin_s + when) * scale) for when in (span.start_s, span.end_s))
            if name and last is not None and start <= last.stop + 1:
                last = last._replace(stop=stop)
                continue
            if last is not None:
                yield _LANES[lane], last
            last = Bar(start, stop, name or label_words(span.task.name), work)
        assert last is not None
        yield _LANES[lane], last


def _exposed(run: "Timeline", begin_s: float, work: str, scale: float) -> Iterator[Bar]:
    """The parts of a pass's communication in which the device does not compute."""
    computing = sorted((s.start_s, s.end_s) for s in run.spans if s.task.lane == COMPUTE)
    idle = list(pairwise([0.0, *chain.from_iterable(computing), inf]))[::2]
    ends, done = [end for _, end in idle], 0.0
    for span in sorted((s for s in run.spans if s.task.lane != COMPUTE), key=lambda s: s.start_s):
        for from_s, until_s in islice(idle, bisect_right(ends, span.start_s), None):
            if from_s >= span.end_s:
                break
            start, stop = max(span.start_s, from_s, done), min(span.end_s, until_s)
            if stop > start:  # else another message was waited for meanwhile
                done = stop
                first, last = (round((begin_s + at) * scale) for at in (start, stop))
                yield Bar(first, last, label_words(span.task.name), work)


def _pass_name(simulated: "Simulation", p: "Pass") -> str:
    chunk = f", chunk {p.step.chunk}" if simulated.work.interleave > 1 else ""
    return f"microbatch {p.step.microbatch}{chunk}"
