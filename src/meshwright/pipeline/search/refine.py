"""Optimises the split of each stage of the best pipeline on its own, and resumes the search with these splits.

Up to this point the split of every stage comes from a solve of the whole model. A solve of the stage alone
(`stage_problem`) finds its best split, which joins the options of its submesh, for this stage and for every other one.
With these options the dynamic programme is solved again, until that gains nothing. Options are only added, so no result
gets worse.

Where a stage's best split does not fit, a price of memory finds the best split that does. The time and the bytes of
splits are points in a plane; solves with a price per byte find the points on their lower convex hull. Between a split
that fits and one that does not, the price at which both cost the same finds a split below their line, or shows that
there is none.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwright.cost.sustained import sustained_ways
from meshwright.pipeline.prices.kernels import ACTIVATIONS, MICROBATCH
from meshwright.pipeline.prices.layer_prices import Item
from meshwright.pipeline.prices.stage_options import Option, Options
from meshwright.pipeline.prices.stage_problem import MemoryPrice, Own
from meshwright.pipeline.search.equal_stages import stage_sums
from meshwright.pipeline.search.result import FoundPipeline, FoundStage
from meshwright.pipeline.search.search import PipelineSearch
from meshwright.plans.stage import EXCHANGED

_GAIN = 1e-4  # relative gain of the step below which the search ends
_ROUNDS = 8
_MEMORY_PRICE = (
    100.0  # price of all of a stage's memory, in times of its own time, that finds its split of least memory
)
_PRICES = 6  # prices of memory that are tried between two splits


def refine(search: PipelineSearch) -> None:
    """Improves a search's best pipeline, if possible, with microbatches of its size or of the next."""
    for _ in range(_ROUNDS):
        before = search.best
        if before is None or search.is_over:
            return
        sizes = search.catalogue.microbatches
        at = sizes.index(search.catalogue.rows.batch // before.pipeline.num_microbatches)
        for rows in (sizes[at], *sizes[max(at - 1, 0) : at], *sizes[at + 1 : at + 2]):
            wider = rows == sizes[at] and search.catalogue.widen(rows)
            if _add_splits(search, before, rows) or wider:
                search.again(before, rows)
        if search.best_s > before.total_s * (1 - _GAIN):
            return


def _add_splits(search: PipelineSearch, found: FoundPipeline, rows: int) -> bool:
    """Adds the stages' own splits for one size of microbatch to the options; returns whether any was new."""
    catalogue, added = search.catalogue, False
    for stage in found.stages:
        option = stage.option
        if option.inner == 1 or rows % option.data:
            continue
        for zero in sorted({min(option.zero, 1), option.zero}):
            for way in _Splitting(search, found, stage, replace(option, zero=zero), rows).ways():
                added |= catalogue.add(stage.group, option.view, way, rows // option.data)
    return added


class _Splitting:
    """One stage and the splits that are optimised for it alone."""

    def __init__(self, search: PipelineSearch, found: FoundPipeline, stage: FoundStage, option: Option, rows: int):
        self.search, self.stage, self.option, self.rows = search, stage, option, rows
        self.number = search.catalogue.rows.batch // rows
        self.in_flight = stage.in_flight / found.pipeline.interleave
        self.limit = search.catalogue.limits[stage.group]

    def ways(self) -> Iterator[Own]:
        """The best way and, where that does not fit, ways near it that fit or nearly fit."""
        best = self._way(None)
        best_s, needed = self._priced(best)
        yield best
        if needed <= self.limit or math.isinf(needed):
            return
        lean = self._way(_MEMORY_PRICE * best_s / self.number / self.limit)
        lean_s, least = self._priced(lean)
        yield lean
        if least > self.limit:
            return
        for _ in range(_PRICES):
            if lean_s <= best_s or needed <= least:
                return
            way = self._way((lean_s - best_s) / (needed - least) / self.number)
            seconds, size = self._priced(way)
            if min(abs(size - needed), abs(size - least)) <= 1e-6 * self.limit:
                return
            yield way
            if size <= self.limit:
                lean_s, least = seconds, size
            else:
                best_s, needed = seconds, size

    def _way(self, byte_s: float | None) -> Own:
        option = self.option
        spread = (option.parts(1), option.parts(2), option.parts(3))
        memory = None if byte_s is None else MemoryPrice(byte_s, self.in_flight, spread)
        return Own(self.stage.chunks, self.number, option.checkpoint, self._exchange_s(), memory)

    def _exchange_s(self) -> float:
        """Seconds per byte that replicas exchange in a step, by the quickest algorithm for the current bytes."""
        mesh, items = self.option.mesh, self.option.prices.items
        if mesh.sizes[0] == 1 or not self.option.trains:
            return 0.0
        size = sum(float(items[Item.GRADIENT_BYTES, a:b].sum()) for a, b in self.stage.chunks)
        once, each = (
            sum(min(sustained_ways(mesh, kind, (0,)), key=lambda way: way[0] + way[1] * size)[1] for kind in kinds)
            for kinds in EXCHANGED[self.option.zero]
        )
        return once + self.number * each

    def _priced(self, way: Own) -> tuple[float, float]:
        """The stage's own time in a step, and the bytes that it needs; infinite where it cannot be split so."""
        catalogue, option = self.search.catalogue, self.option
        prices = catalogue.prices(self.stage.group, option.view, way, self.rows // option.data)
        if prices is None:
            return math.inf, math.inf
        options = Options(catalogue, self.stage.group, [replace(option, way=way, prices=prices)], self.rows)
        first, last = np.array(self.stage.chunks).T[:, None]
        part, once, fixed = stage_sums(options, (first, last))
        seconds = self.number * part[0, MICROBATCH, 0] + once[0, 0]
        return float(seconds), float(fixed[0, 0] + self.in_flight * part[0, ACTIVATIONS, 0])
