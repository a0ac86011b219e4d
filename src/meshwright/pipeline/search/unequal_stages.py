"""Stages of any size for one size of microbatch, recomputation and schedule, along one line of devices."""

from dataclasses import dataclass

import numpy as np

from meshwright.pipeline.prices.kernels import MICROBATCH
from meshwright.pipeline.prices.stage_options import Options, Pace
from meshwright.pipeline.search.device_line import Line, neighbours, place
from meshwright.pipeline.search.dynamic_programme import Ranges, Solution, may_beat, solve_stages
from meshwright.pipeline.search.result import FoundPipeline, FoundStage
from meshwright.plans.stage import Pipeline
from meshwright.schedules import SCHEDULES, in_flight

Kind = tuple[int, int, Options]  # group of hosts, devices, the ways to split a stage on them


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
