"""Searches pipelines: numbers of microbatches, schedules, recomputation, equal stages and unequal ones.

First every recipe of equal stages is priced, which is quick and gives a time to beat; then, for each size of
microbatch, recomputation and schedule, the dynamic programme looks for stages that beat it. All are priced by the same
sums over the same prices, so the result is no worse than any recipe.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from meshwright.arrays import Bools, Floats, Ints
from meshwright.errors import DoesNotFit, ShardingError
from meshwright.graph.phases import BACKWARD, PHASES
from meshwright.pipeline.layers.forward_pass import Flow
from meshwright.pipeline.prices.catalogue import TENSOR, Catalogue
from meshwright.pipeline.prices.kernels import ACTIVATIONS, MICROBATCH, STATE
from meshwright.pipeline.prices.stage_options import CHECKPOINTS, Options, find_options
from meshwright.pipeline.search.device_line import Line, neighbours, orders, place
from meshwright.pipeline.search.equal_stages import (
    PricedPipeline,
    Split,
    ThreeD,
    check_recipe,
    equal_stages,
    price_recipe,
)
from meshwright.pipeline.search.result import FoundPipeline, FoundStage
from meshwright.pipeline.search.unequal_stages import Programme
from meshwright.planner.budget import Budget
from meshwright.plans.stage import Pipeline
from meshwright.schedules import SCHEDULES, in_flight
from meshwright.units import format_bytes

_LARGE_FLOPS = 1e12  # of a product that reaches a chip's full rate


class PipelineSearch:
    """The best pipeline so far.

    Attributes:
        best: The incumbent, or None.
        flops: Of each layer in one step, without recomputation by the user's own checkpoints.
        tried: How many pipelines and dynamic programmes were priced.
        bound_s: A lower bound on all plans of the method: each layer at its least time, with unlimited memory and all
            devices always busy (`Options.least_s`), for the best size of microbatch.
        beat_s: The time of a plan known from elsewhere; only quicker pipelines are searched for.
        nearest_bytes: The least bytes of a device that would let a pipeline fit, where none does; `nearest` says which.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        flow: Flow,
        say: Callable[[str], None],
        budget: Budget | None = None,
    ):
        self.catalogue, self.flow, self.say, self.beat_s = catalogue, flow, say, np.inf
        self.budget, self._is_cut = budget or Budget(), False
        layers, forward = catalogue.layers, flow.forward
        self._forward = layers.gather(layers.places.unit[forward], flow.flops[forward])
        self.flops = layers.gather(layers.places.unit, flow.flops * ~flow.recomputed)
        loops = [(int(a), int(n)) for a, n in zip(layers.first, layers.count, strict=True) if n > 1]
        self._loop = loops[0] if len(loops) == 1 else (0, 0)
        self._splits: dict[bytes, Split] = {}  # by the layers' work
        self.trains = bool((catalogue.rows.whole.columns.phase == PHASES.index(BACKWARD)).any())
        self.checkpoints: tuple[str, ...] = CHECKPOINTS if self.trains else CHECKPOINTS[:1]
        self.best: FoundPipeline | None = None
        self.tried = 0
        self.nearest_bytes, self.nearest = np.inf, ""
        rates = [1 / group.chip.matmul_s(_LARGE_FLOPS) for group in catalogue.cluster.groups]
        total = sum(rate * group.num_devices for rate, group in zip(rates, catalogue.cluster.groups, strict=True))
        self._share = [rate / total for rate in rates]  # one device's share of the cluster's compute
        self._least: dict[int, Floats] = {}  # by rows of a microbatch, for each layer
        self._outside_s = np.inf  # a bound on plans that are no pipelines
        self._options: dict[tuple[int, int, int, str, int | None], Options | None] = {}

    def only_like(self, last: Pipeline) -> None:
        """Looks only for pipelines with the recomputation of a known one, and microbatches of about its size."""
        rows = self.catalogue.rows.batch // last.num_microbatches
        near = [size for size in self.catalogue.microbatches if rows / 2 <= size <= rows]
        self.catalogue.microbatches = near or self.catalogue.microbatches
        self.checkpoints = tuple(word for word in self.checkpoints if word == last.checkpoint) or self.checkpoints
        self._is_cut = True

    @property
    def num_layers(self) -> int:
        return self.catalogue.layers.num_layers

    @property
    def best_s(self) -> float:
        return self.beat_s if self.best is None else self.best.total_s

    def options(
        self, group: int, devices: int, rows: int, checkpoint: str, tensor: int | None = None
    ) -> Options | None:
        """The ways to split a stage, as of `find_options`."""
        key = (group, devices, rows, checkpoint, tensor)
        if key not in self._options:
            self._options[key] = found = find_options(self.catalogue, *key)
            if found is not None:
                least = found.least_s(self.catalogue.rows.batch // rows, devices * self._share[group])
                self._least[rows] = np.minimum(self._least.get(rows, np.inf), least)
        return self._options[key]

    @property
    def is_over(self) -> bool:
        """Whether there is a pipeline and no time to look for a better one."""
        over = self.budget.is_over and self.best_s < np.inf
        self._is_cut |= over
        return over

    @property
    def bound_s(self) -> float:
        if self._is_cut:  # a pipeline that was not priced may be quicker
            return 0.0
        return min([self._outside_s, *(float(least.sum()) for least in self._least.values())])

    def note_bound(self, seconds: float) -> None:
        """Records a lower bound on plans without stages."""
        self._outside_s = min(self._outside_s, seconds)

    # Recipes of equal stages.

    def all_recipes(self) -> None:
        """Prices every pipeline of equal stages."""
        cluster = self.catalogue.cluster
        if cluster.mixed:
            return
        self.say("pricing pipelines of equal stages")
        shapes = list(equal_stages(cluster.num_devices, cluster.devices_per_host, self.num_layers))
        for tensor in self.catalogue.tensor_sizes(0, cluster.num_devices):
            if self.catalogue.least_s(0, (tensor,), TENSOR) >= self.best_s:
                continue
            for num_stages, devices in (shape for shape in shapes if shape[1] % tensor == 0):
                for rows in self.catalogue.microbatches:
                    for checkpoint in self.checkpoints:
                        self._recipes(num_stages, devices, tensor, rows, checkpoint)
        for rows in self.catalogue.microbatches:
            for num_stages, devices in shapes:
                for checkpoint in self.checkpoints:
                    self._recipes(num_stages, devices, None, rows, checkpoint)

    def best_recipe(self, num_stages: int, is_worth: Callable[[int, int], bool]) -> FoundPipeline | None:
        """The best pipeline of so many equal stages that splits weights inside of hosts alone; None where none is.

        Args:
            num_stages: How many.
            is_worth: Whether a number of devices that split weights and one of microbatches are to be looked at.
        """
        cluster, self.best = self.catalogue.cluster, None
        shapes = dict(equal_stages(cluster.num_devices, cluster.devices_per_host, self.num_layers))
        if num_stages not in shapes:  # their devices would be parts of several hosts
            return None
        devices = shapes[num_stages]
        for tensor in self.catalogue.tensor_sizes(0, devices):
            for rows in self.catalogue.microbatches if tensor <= cluster.devices_per_host else ():
                if rows * tensor % devices == 0 and is_worth(tensor, self.catalogue.rows.batch // rows):
                    for checkpoint in self.checkpoints:
                        self._recipes(num_stages, devices, tensor, rows, checkpoint)
        return self.best

    def _recipes(self, num_stages: int, devices: int, tensor: int | None, rows: int, checkpoint: str) -> None:
        """Prices all schedules of one shape that can beat the incumbent."""
        if self.is_over:
            return
        options = self.options(0, devices, rows, checkpoint, tensor)
        if options is None:
            return
        num_microbatches = self.catalogue.rows.batch // rows
        whole = options.sums[:, 0, -1].min() * num_microbatches  # of all stages together
        if whole / num_stages >= self.best_s:
            return
        for schedule, interleave in self._schedules(num_stages, num_microbatches):
            self._recipe(options, num_stages, Pipeline(schedule, num_microbatches, interleave, checkpoint))

    def one_recipe(self, recipe: ThreeD) -> None:
        """Prices one recipe.

        Raises:
            ShardingError: The model or the cluster does not allow it.
        """
        devices, rows = check_recipe(recipe, self.catalogue, self.trains)
        options = self.options(0, devices, rows, recipe.checkpoint, recipe.tensor)
        if options is None:
            raise ShardingError(
                f"{recipe.name}: microbatches of {recipe.microbatch} rows cannot be had on {recipe.tensor} devices: "
                "the model's sizes do not divide; choose another microbatch or tensor"
            )
        num_microbatches = self.catalogue.rows.batch // rows
        pipeline = Pipeline(recipe.schedule, num_microbatches, recipe.interleave, recipe.checkpoint)
        self._recipe(options, recipe.pipeline, pipeline)

    def _recipe(self, options: Options, num_stages: int, pipeline: Pipeline) -> None:
        """Prices a pipeline of equal stages, and keeps it if it is the best."""
        self.tried += 1
        devices = options.options[0].mesh.num_devices
        near = neighbours(place(self.catalogue.cluster, [(options.group, devices)] * num_stages))
        for turn, chunks in enumerate(self._chunks(options, num_stages, pipeline)):
            priced = price_recipe(options, chunks, pipeline.schedule, pipeline.num_microbatches, near)
            self._keep(options, chunks, pipeline, priced, near)
            if turn == 0 and priced.free_s >= self.best_s:  # more memory would not help
                return

    def _chunks(self, options: Options, num_stages: int, pipeline: Pipeline) -> Iterator[tuple[Ints, Ints]]:
        """Layers weighed by their time in a whole step, since a loss may compute gradients in its forward pass.

        What comes after is for tight memory: the same weights with stages that fit by each of the options, quick ones
        and lean ones, and forward FLOPs, which no option's memory shapes.
        """
        work, interleave = self._split(options.work), pipeline.interleave
        yield work.chunks(num_stages, interleave)
        held = in_flight(pipeline.schedule, num_stages, pipeline.num_microbatches, interleave)
        whole = options.sums[:, :, -1]
        least_bytes = whole[:, STATE] + min(held) / interleave * whole[:, ACTIVATIONS]  # of all stages together
        least_s = pipeline.num_microbatches / num_stages * whole[:, MICROBATCH]
        least_s[least_bytes > num_stages * options.limit] = np.inf
        for number in least_s.argsort(kind="stable").tolist():
            if least_s[number] >= self.best_s:
                break
            found = work.fitting_chunks(options.fits(number, held, interleave), interleave)
            if found is not None:
                yield found
        yield self._split(self._forward).chunks(num_stages, interleave)

    def _keep(
        self, options: Options, chunks: tuple[Ints, Ints], pipeline: Pipeline, priced: PricedPipeline, near: Bools
    ) -> None:
        """Keeps a pipeline of equal stages if it is the best, and notes what it needs if it does not fit."""
        num_stages = len(near)
        if np.isinf(priced.total_s):
            words = f"pipeline={num_stages} by {pipeline.schedule} with checkpoint={pipeline.checkpoint}"
            self.note_misfit(float(priced.peak_bytes.max()), words)
        if priced.total_s >= self.best_s:
            return
        held = in_flight(pipeline.schedule, num_stages, pipeline.num_microbatches, pipeline.interleave)
        ranges = zip(*(side.tolist() for side in chunks), strict=True)
        stages = tuple(
            FoundStage(tuple(zip(first, last, strict=True)), options.group, options.options[option], number, close)
            for (first, last), option, number, close in zip(
                ranges, priced.option.tolist(), held, near.tolist(), strict=True
            )
        )
        self.best = FoundPipeline(priced.total_s, pipeline, stages)

    def _split(self, work: Floats) -> Split:
        key = work.tobytes()
        if key not in self._splits:
            self._splits[key] = Split(work, self._loop)
        return self._splits[key]

    def note_misfit(self, needed_bytes: float, words: str) -> None:
        """Records the pipeline that came nearest to fitting."""
        if needed_bytes < self.nearest_bytes:
            self.nearest_bytes, self.nearest = needed_bytes, words

    def _schedules(self, num_stages: int, num_microbatches: int) -> Iterator[tuple[str, int]]:
        """Schedules and chunks that can be best; GPipe never is: 1F1B takes as long and holds less."""
        yield ("1f1b" if self.trains else "inference"), 1
        if num_stages == 1:
            return
        if self.trains and num_microbatches >= SCHEDULES["zb-h1"].full_from * num_stages:
            yield "zb-h1", 1
        if num_microbatches % num_stages == 0:
            for interleave in range(2, self.num_layers // num_stages + 1):
                yield ("interleaved" if self.trains else "inference"), interleave

    # Stages of any size, by dynamic programming.

    def all_programmes(self) -> None:
        """Searches for unequal stages that beat the incumbent."""
        batch = self.catalogue.rows.batch
        for rows in self.catalogue.microbatches:
            self.say(f"cutting stages for {batch // rows} microbatches of {rows} rows")
            self._programmes(rows)

    def _programmes(self, rows: int) -> None:
        """Searches for better stages with one size of microbatch."""
        for checkpoint in self.checkpoints:
            for schedule in ("zb-h1", "1f1b") if self.trains else ("inference",):
                for order in orders(len(self.catalogue.cluster.groups)):
                    self._programme(rows, checkpoint, schedule, order)

    def _programme(self, rows: int, checkpoint: str, schedule: str, order: Sequence[int]) -> None:
        """Searches for better stages with one size of microbatch, recomputation, schedule and order of groups."""
        if self.is_over:
            return
        line = Line(self.catalogue.cluster, order)
        tried = [(g, n, self.options(g, n, rows, checkpoint)) for g, n in line.kinds]
        kinds = [(g, n, options) for g, n, options in tried if options is not None]
        pipeline = Pipeline(schedule, self.catalogue.rows.batch // rows, 1, checkpoint)
        self.tried += bool(kinds)
        found = Programme(pipeline, line, kinds).solve(self.best_s)
        if found is not None:
            self.best = found

    def again(self, found: FoundPipeline, rows: int) -> None:
        """Searches again for pipelines with one size of microbatch, with the options priced by now.

        It tries stages of any size and, if a pipeline already found has equal stages, those in any number of chunks.
        """
        sizes = set(found.sizes)
        self._options = {key: options for key, options in self._options.items() if key[2] != rows}
        if len(sizes) == 1 and not self.catalogue.cluster.mixed:
            ((_, devices),) = sizes
            for checkpoint in self.checkpoints:
                self._recipes(len(found.stages), devices, None, rows, checkpoint)
        self._programmes(rows)

    def does_not_fit(self) -> DoesNotFit:
        """The error for a model that fits nowhere: how near the nearest pipeline came."""
        limit, needed = (self.catalogue.needed * size for size in (min(self.catalogue.limits), self.nearest_bytes))
        near = "" if np.isinf(needed) else f"; the nearest, {self.nearest}, needs {format_bytes(needed)}"
        return DoesNotFit(
            f"no pipeline fits {format_bytes(limit)} per device{near}. Use more devices, a smaller batch or devices "
            "with more memory.",
            needed_bytes=int(np.ceil(needed)) if np.isfinite(needed) else int(limit) + 1,
            limit_bytes=int(limit),
        )
