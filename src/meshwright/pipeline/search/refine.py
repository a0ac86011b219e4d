"""Splits the stages of the best pipeline each for itself, and searches on with these splits.

Until here every stage is split as a solve of the whole model says. What a stage would rather do is found by a solve of
its own (`own`), and joins the options of its submesh: for this stage, and for every other one that is tried. With these
the programme is asked again, until that gains nothing. Options are only ever added, so nothing gets worse.

Where a stage's best split does not fit, the best that does is looked for by what memory is worth. The time and the
bytes of splits are points in a plane; a price per byte finds those on the lower hull of all. Between one that fits and
one that does not, the price at which both are worth the same finds one below their line, or shows that there is none.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwright.pipeline.prices.kernels import ACTIVATIONS, MICROBATCH
from meshwright.pipeline.prices.layer_prices import Item
from meshwright.pipeline.prices.stage_options import Option, Options
from meshwright.pipeline.prices.stage_problem import Dearness, Own
from meshwright.pipeline.search.equal_stages import stage_sums
from meshwright.pipeline.search.result import Found, FoundStage
from meshwright.pipeline.search.search import Search
from meshwright.plans.stage import EXCHANGED

_GAIN = 1e-4  # of the step, below which it is not searched on
_ROUNDS = 8
_DEAR = 100.0  # times the stage's own time, for all of its memory: what finds the least that it can do with
_PRICES = 6  # of memory that are tried between two splits


def refine(search: Search) -> None:
    """Replaces a search's best pipeline by better ones, with microbatches of its size or of the next, if there are."""
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


def _add_splits(search: Search, found: Found, rows: int) -> bool:
    """Adds the stages' own splits for one size of microbatch to the options; returns whether there were new ones."""
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
    """One stage and the ways to split it for itself."""

    def __init__(self, search: Search, found: Found, stage: FoundStage, option: Option, rows: int):
        self.search, self.stage, self.option, self.rows = search, stage, option, rows
        self.number = search.catalogue.rows.batch // rows
        self.in_flight = stage.in_flight / found.pipeline.interleave
        self.limit = search.catalogue.limits[stage.group]

    def ways(self) -> Iterator[Own]:
        """The best way and, where that does not fit, those nearby that do or nearly do."""
        best = self._way(None)
        best_s, needed = self._priced(best)
        yield best
        if needed <= self.limit or math.isinf(needed):
            return
        lean = self._way(_DEAR * best_s / self.number / self.limit)
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
        memory = None if byte_s is None else Dearness(byte_s, self.in_flight, spread)
        return Own(self.stage.chunks, self.number, option.checkpoint, self._exchange_s(), memory)

    def _exchange_s(self) -> float:
        """Seconds per byte that replicas exchange in a step, by the way that is quickest for what they do now."""
        mesh, items = self.option.mesh, self.option.prices.items
        if mesh.sizes[0] == 1 or not self.option.trains:
            return 0.0
        size = sum(float(items[Item.GRADIENT_BYTES, a:b].sum()) for a, b in self.stage.chunks)
        once, each = (
            sum(min(mesh.alternatives(kind, (0,)), key=lambda way: way[0] + way[1] * size)[1] for kind in kinds)
            for kinds in EXCHANGED[self.option.zero]
        )
        return once + self.number * each

    def _priced(self, way: Own) -> tuple[float, float]:
        """The stage's own time in a step, and the bytes that it needs; infinite where it cannot be split so."""
        catalogue, option = self.search.catalogue, self.option
        prices = catalogue.prices(self.stage.group, option.view, way, self.rows // option.data)
        if prices is None:
            return math.inf, math.inf
        options = Options(catalogue, self.stage.group, [replace(option, way=way, prices=prices)])
        first, last = np.array(self.stage.chunks).T[:, None]
        part, once, fixed = stage_sums(options, (first, last))
        seconds = self.number * part[0, MICROBATCH, 0] + once[0, 0]
        return float(seconds), float(fixed[0, 0] + self.in_flight * part[0, ACTIVATIONS, 0])
