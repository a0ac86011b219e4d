"""Stages of any size for one size of microbatch, recomputation and schedule, along one line of devices.

The inter-operator dynamic programme finds which layers go on which submesh. If each stage ``s`` of a pipeline adds
``fill_s`` to the time that a microbatch takes through the pipeline, and is busy for ``busy_s`` besides, a step takes

    T = Σ_s fill_s + max_s busy_s.

As in Alpa's inter-operator pass, the second term is fixed first: F(s, k, d; t_max) is the least Σ fill of ``s`` stages
that hold the layers from ``k`` on, on exactly ``d`` devices, none busier than ``t_max`` (`kernels.cheapest_staged`).
The number of stages matters because the ``s``-th from the end holds ``in_flight(s)`` microbatches.

Not every ``t_max`` need be tried. F grows as ``t_max`` falls, so after a solution with sum ``g`` and busiest stage
``b``, limits between ``b`` and the last one give nothing new, and one of ``T* − g`` or more cannot beat the best
``T*``: the next limit is the smaller of the two, until nothing fits. A limit also gives the least number of devices
that the layers from ``k`` on need, and that the layers before need: other ``d`` are skipped (`kernels._window`). If a
solution of the relaxed programme without ``s``, in which each range has its least cost, is feasible, it is optimal:
F(s, k, d) is computed only where memory binds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Floats, Ints
from meshwright.pipeline.prices.kernels import MICROBATCH, cheapest, cheapest_staged
from meshwright.pipeline.prices.stage_options import Options, Pace
from meshwright.pipeline.search.device_line import Line, neighbours, place
from meshwright.pipeline.search.result import FoundPipeline, FoundStage
from meshwright.plans.stage import Pipeline
from meshwright.schedules import SCHEDULES, in_flight

Kind = tuple[int, int, Options]  # group of hosts, devices, the ways to split a stage on them

InFlight = Callable[[int], Sequence[int] | None]  # None where there may not be so many stages
_LESS = 1 - 1e-9


class ChosenStage(NamedTuple):
    """One stage of a solution: its layers, its kind of submesh, and how many microbatches it holds."""

    first: int
    last: int
    kind: int
    in_flight: int


class Solution(NamedTuple):
    """Stages, first to last, and the time of a step."""

    total_s: float
    parts: tuple[ChosenStage, ...]


@dataclass(frozen=True)
class Ranges:
    """Every range of layers on every kind of submesh.

    Attributes:
        fill, busy: Seconds, for each kind of submesh, number of microbatches in flight (one less), first layer and end;
            infinite where it does not fit. Several ways to split a stage on one submesh are as many kinds.
        size: Devices of each kind of submesh.
        allowed: For each kind and number of devices left, whether a stage can take the first of these.
    """

    fill: Floats
    busy: Floats
    size: Ints
    allowed: NDArray[np.bool_]


def solve_stages(ranges: Ranges, in_flight: InFlight, best_s: float = np.inf) -> Solution | None:
    """The stages of the quickest step that takes less than ``best_s``; None if there are none.

    Args:
        ranges: The costs.
        in_flight: For a number of stages, the microbatches that each of them holds; None where it is not allowed.
        best_s: The time of the incumbent.
    """
    relaxed = _relaxed(ranges, range(1, ranges.fill.shape[1] + 1), best_s)
    if relaxed is None:
        return None
    held = in_flight(len(relaxed.parts))
    real = None if held is None else _holding(ranges, relaxed, held)
    return _staged(ranges, in_flight, best_s) if real is None else real


def may_beat(ranges: Ranges, best_s: float) -> bool:
    """Whether any stages take less than ``best_s`` if each range has its least cost over the numbers in flight."""
    return _relaxed(ranges, range(1, ranges.fill.shape[1] + 1), best_s, once=True) is not None


def _staged(ranges: Ranges, in_flight: InFlight, best_s: float) -> Solution | None:
    """Where memory binds: all numbers of stages at once, if a stage's microbatches depend only on the stages after it.

    Otherwise one number of stages after another, without the numbers that are too slow even in the relaxation.
    """
    most = min(ranges.fill.shape[2], ranges.allowed.shape[1] - 1)
    held = {count: numbers for count in range(1, most + 1) if (numbers := in_flight(count)) is not None}
    if most in held and all(tuple(held[most][most - n :]) == tuple(numbers) for n, numbers in held.items()):
        return _with_stages(ranges, held[most][::-1], best_s, None)
    found = None
    for count, numbers in held.items():
        relaxed = _relaxed(ranges, sorted(set(numbers)), best_s)
        if relaxed is None:
            continue
        better = _holding(ranges, relaxed, numbers) if len(relaxed.parts) == count else None
        better = better or _with_stages(ranges, numbers[::-1], best_s, count)
        if better is not None:
            found, best_s = better, better.total_s
    return found


def _relaxed(ranges: Ranges, held: Sequence[int], best_s: float, once: bool = False) -> Solution | None:
    """The best stages, whatever their number, if each range has its least cost over the numbers in ``held``.

    With ``once``, the first stages that are better than ``best_s``.
    """
    places = [number - 1 for number in held]
    fill, busy = ranges.fill[:, places].min(axis=1), ranges.busy[:, places].min(axis=1)

    def solve(limit: float) -> list[ChosenStage] | None:
        best, end, kind = cheapest(fill, busy, ranges.size, ranges.allowed, limit)
        left, first, parts = ranges.allowed.shape[1] - 1, 0, []
        if not np.isfinite(best[left, 0]):
            return None
        while left:
            parts.append(ChosenStage(first, int(end[left, first]), int(kind[left, first]), 1))
            first, left = parts[-1].last, left - int(ranges.size[parts[-1].kind])
        return parts

    return _descend(solve, fill, busy, best_s, once)


def _holding(ranges: Ranges, relaxed: Solution, held: Sequence[int]) -> Solution | None:
    """A relaxed solution with the true numbers of microbatches in flight; None if that makes it slower."""
    parts = tuple(part._replace(in_flight=n) for part, n in zip(relaxed.parts, held, strict=True))
    places = [_place(part, 4) for part in parts]
    total = sum(float(ranges.fill[p]) for p in places) + max(float(ranges.busy[p]) for p in places)
    return Solution(total, parts) if total <= relaxed.total_s else None


def _with_stages(ranges: Ranges, from_end: Sequence[int], best_s: float, count: int | None) -> Solution | None:
    """The best solution with any number of stages, or with an exact number."""
    held = np.array(from_end, np.int64)

    def solve(limit: float) -> list[ChosenStage] | None:
        tables = cheapest_staged(ranges.fill, ranges.busy, ranges.size, ranges.allowed, limit, held)
        sums = tables[0][:, -1, 0]
        stages = int(np.argmin(sums)) if count is None else count
        if not np.isfinite(sums[stages]):
            return None
        parts, first, left = [], 0, ranges.allowed.shape[1] - 1
        for stage in range(stages, 0, -1):
            last, kind = int(tables[1][stage, left, first]), int(tables[2][stage, left, first])
            parts.append(ChosenStage(first, last, kind, int(held[stage - 1])))
            first, left = last, left - int(ranges.size[kind])
        return parts

    return _descend(solve, ranges.fill, ranges.busy, best_s)


def _descend(
    solve: Callable[[float], list[ChosenStage] | None], fill: Floats, busy: Floats, best_s: float, once: bool = False
) -> Solution | None:
    """Lowers the limit on the busiest stage until no better solution exists, or until the first is found."""
    found, limit = None, best_s
    while (parts := solve(limit)) is not None:
        places = [_place(part, fill.ndim) for part in parts]
        total = sum(float(fill[place]) for place in places)
        busiest = max(float(busy[place]) for place in places)
        if total + busiest < best_s * _LESS:
            best_s, found = total + busiest, Solution(total + busiest, tuple(parts))
            if once:
                break
        limit = min(busiest * _LESS, best_s - total)
        if limit <= 0:
            break
    return found


def _place(part: ChosenStage, dims: int) -> tuple[int, ...]:
    held = () if dims == 3 else (part.in_flight - 1,)
    return (part.kind, *held, part.first, part.last)


@dataclass(frozen=True)
class Programme:
    """One dynamic programme.

    The search assumes that all stages send over the links between hosts; the result is priced by the final placement.

    Attributes:
        pipeline: How the stages work together.
        line: The line of devices on which they are placed.
        kinds: The kinds of submesh that a stage can have.
    """

    pipeline: Pipeline
    line: Line
    kinds: list[Kind]

    def solve(self, best_s: float) -> FoundPipeline | None:
        """The best stages that take less than ``best_s``; None if there are none.

        With a single microbatch in flight every option fits that fits at all: if this bound is too slow, so is the
        rest.
        """
        if not self.kinds:
            return None
        count, schedule = self.pipeline.num_microbatches, SCHEDULES[self.pipeline.schedule]
        most = min(count, self.kinds[0][2].num_layers, self.line.num_units)
        hides = 1.0 - schedule.fill(0.0, 1.0, 1.0, 1)
        floor = np.min([options.least_fill(hides) for *_, options in self.kinds], axis=0)
        pace = Pace(1, count, hides, np.concatenate([[0.0], np.cumsum(floor)]), best_s)
        if not may_beat(_Priced(self, pace).ranges, best_s):
            return None
        priced = _Priced(self, pace._replace(most=most))

        def held(stages: int) -> list[int] | None:
            full = count >= schedule.full_from * stages
            return [min(n, most) for n in in_flight(schedule.name, stages, count)] if full else None

        solution = solve_stages(priced.ranges, held, best_s)
        found = None if solution is None else priced.found(solution)
        return found if found is not None and found.total_s < best_s else None


class _Priced:
    """The ranges of a programme, and the options that they were priced by."""

    def __init__(self, programme: Programme, pace: Pace):
        self._programme, line = programme, programme.line
        tables = [options.price(pace) for *_, options in programme.kinds]
        fill, busy, self._which = (np.concatenate(parts) for parts in zip(*tables, strict=True))
        self._kinds = [programme.kinds[z] for z, table in enumerate(tables) for _ in table[0]]  # one for each rank
        size = np.array([n // line.unit for _, n, _ in self._kinds], np.int64)
        allowed = np.array([line.allowed(g, n) for g, n, _ in self._kinds], bool)
        self.ranges = Ranges(fill, busy, size, allowed.reshape(len(size), line.num_units + 1))

    def found(self, solution: Solution) -> FoundPipeline:
        """A solution as a pipeline, priced by the placement of its stages."""
        programme, ranges = self._programme, self.ranges
        near = neighbours(place(programme.line.cluster, [self._kinds[part.kind][:2] for part in solution.parts]))
        stages, adds, rest = [], [], []
        for part, close in zip(solution.parts, near.tolist(), strict=True):
            group, _, options = self._kinds[part.kind]
            at = (part.kind, part.in_flight - 1, part.first, part.last)
            number = int(self._which[at])
            own = options.sums[number, MICROBATCH, part.last] - options.sums[number, MICROBATCH, part.first]
            far, sent = (float(options.transfer(some)[number, part.last]) for some in (False, close))
            waits = (programme.pipeline.num_microbatches - 1) * (max(own, far) - max(own, sent))
            adds.append(float(ranges.fill[at] - far + sent))
            rest.append(float(ranges.busy[at] - waits))
            stages.append(FoundStage(((part.first, part.last),), group, options.options[number], part.in_flight, close))
        return FoundPipeline(sum(adds) + max(rest), programme.pipeline, tuple(stages))
