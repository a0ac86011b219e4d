"""Recipes: pipelines of equal stages, as experts lay them out by hand, and their costs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from meshwright.arrays import Bools, Floats, Ints
from meshwright.errors import ShardingError
from meshwright.pipeline.prices.catalogue import Catalogue
from meshwright.pipeline.prices.kernels import ACTIVATIONS, GRADIENTS, MICROBATCH, ONCE, STATE, WEIGHTS
from meshwright.pipeline.prices.stage_options import CHECKPOINTS, Options
from meshwright.planner.methods import Method
from meshwright.schedules import SCHEDULES, find_schedule

_EQUAL = 1 + 1e-9  # sums of equal work, in another order


@dataclass(frozen=True)
class ThreeD(Method):
    """Data, tensor and pipeline parallelism, as Megatron-LM lays them out: all stages have equally many devices.

    Args:
        data: Replicas of each stage.
        tensor: Devices over which each replica splits its weights; neighbours.
        pipeline: Stages.
        microbatch: Rows of a microbatch for each replica.
        schedule: ``gpipe``, ``1f1b``, ``zb-h1`` or ``inference``.
        interleave: Chunks of the model on each stage.
        checkpoint: The activations that the backward pass recomputes: ``none``, ``selective`` (all but products with
            weights) or ``full`` (everything but the inputs of layers).
        layers, boundaries: As in `Auto`.
        memory_fraction: As in every `Method`.

    Examples:
        >>> import meshwright as mw
        >>> from meshwright import zoo
        >>> model = zoo.build("mlp", batch=8, layers=4)
        >>> recipe = mw.ThreeD(data=1, tensor=2, pipeline=2, microbatch=2)
        >>> plan = mw.plan(model.train_step, model.state, model.batch, cluster="1x4 h100", method=recipe)
        >>> len(plan.stages), plan.pipeline.num_microbatches
        (2, 4)
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatch: int = 1
    schedule: str = "1f1b"
    interleave: int = 1
    checkpoint: str = "none"
    layers: int | Sequence[float] | None = field(default=None, kw_only=True)
    boundaries: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("data", "tensor", "pipeline", "microbatch", "interleave"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ShardingError(f"ThreeD {name} is {number!r}; give a whole number of at least 1")
        if self.schedule not in tuple(SCHEDULES):
            raise ShardingError(f"unknown schedule {self.schedule!r}: choose one of {', '.join(SCHEDULES)}")
        if self.checkpoint not in CHECKPOINTS:
            raise ShardingError(f"ThreeD checkpoint is {self.checkpoint!r}; choose one of {', '.join(CHECKPOINTS)}")

    @property
    def name(self) -> str:
        return f"ThreeD({self.data}×{self.tensor}×{self.pipeline})"

    @property
    def num_devices(self) -> int:
        """The devices that it is for."""
        return self.data * self.tensor * self.pipeline

    @property
    def staged(self) -> bool:
        return True


class PricedPipeline(NamedTuple):
    """A pipeline of equal submeshes: the time of a step, the option of each stage, and the bytes that it needs.

    Where a stage does not fit, the time is infinite, and every option is the one that needs least memory; with
    unlimited memory it would be ``free_s``.
    """

    total_s: float
    option: Ints
    peak_bytes: Floats
    free_s: float


class Split:
    """Layers distributed over stages in chunks, so that the busiest chunk has as little work as possible.

    Args:
        work: The work of each layer.
        loop: First and number of the layers that are the trips of one loop, if there is one: chunks have equally many
            of them where that costs nothing, since arrays that are stacked over the trips are then arrays of JAX.
    """

    def __init__(self, work: Floats, loop: tuple[int, int] = (0, 0)):
        self.loop = loop
        work = np.asarray(work, float) / max(np.sum(work), 1e-30)
        self.work = np.concatenate([[0.0], np.cumsum(work if work.all() else work + work.max() / 1000)])
        size = self.work[None, :] - self.work[:, None]
        self._size = np.where(np.triu(np.ones(size.shape, bool), 1), size, np.inf)
        self._edges: dict[int, Ints] = {}

    def chunks(self, num_stages: int, interleave: int) -> tuple[Ints, Ints]:
        """First layer and end of each chunk, stages by rows, chunks by columns."""
        count = num_stages * interleave
        if count not in self._edges:
            found, even = _balanced(np.broadcast_to(self._size, (count, *self._size.shape))), self._even(count)
            assert found is not None  # there are no more chunks than layers
            busiest = np.diff(self.work[found]).max()
            is_best = len(even) > 0 and np.diff(self.work[even]).max() <= busiest * _EQUAL
            self._edges[count] = even if is_best else found
        return _by_stage(self._edges[count], num_stages)

    def fitting_chunks(self, fits: Bools, interleave: int) -> tuple[Ints, Ints] | None:
        """As `chunks`, of those that fit: given by stage, first layer and end; None if there are none."""
        size = np.tile(self._size, (len(fits) * interleave, 1, 1))
        size[:, :-1][~np.tile(fits, (interleave, 1, 1))] = np.inf
        edges = _balanced(size)
        return None if edges is None else _by_stage(edges, len(fits))

    def _even(self, count: int) -> Ints:
        """Edges with equally many trips of the loop in each chunk; none if there are none."""
        first, trips = self.loop
        if not trips or trips % count:
            return np.array([], int)
        return np.array([0, *(first + np.arange(1, count) * (trips // count)), len(self.work) - 1])


def _by_stage(edges: Ints, num_stages: int) -> tuple[Ints, Ints]:
    return edges[:-1].reshape(-1, num_stages).T, edges[1:].reshape(-1, num_stages).T


def _balanced(size: Floats) -> Ints | None:
    """Edges of chunks whose busiest one has the least work; of those, the ones with the least squares.

    Args:
        size: The work by chunk, first layer and end; infinite where it may not be.
    """
    edges = _cheapest(size, np.maximum)
    if edges is None:
        return None
    least = size[np.arange(len(size)), edges[:-1], edges[1:]].max()
    return _cheapest(np.where(size <= least * _EQUAL, size**2, np.inf), np.add)


def _cheapest(cost: Floats, join: Callable[[Floats, Floats], Floats]) -> Ints | None:
    """The edges of chunks with the least total cost, as costs are joined; None if there are none.

    Args:
        cost: By chunk, first layer and end.
    """
    best, came = cost[0, 0], []
    for one in cost[1:]:
        total = join(best[:, None], one)
        came.append(total.argmin(axis=0))
        best = total.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    edges = [len(best) - 1]
    for table in reversed(came):
        edges.append(int(table[edges[-1]]))
    return np.array([0, *reversed(edges)])


def price_recipe(
    options: Options, chunks: tuple[Ints, Ints], name: str, num_microbatches: int, near: Bools
) -> PricedPipeline:
    """The cost of stages on equal submeshes, with the options that are best for the whole pipeline.

    The sums are those of `kernels.price_ranges`, over the chunks of a stage.

    Args:
        options: The ways to split a stage.
        chunks: First layers and ends, as of `Split.chunks`.
        name: The schedule's.
        num_microbatches: How many.
        near: For each stage, whether it sends inside its host.
    """
    last = chunks[1]
    num_stages, interleave = last.shape
    schedule = find_schedule(name, num_stages, num_microbatches, interleave)
    part, once, fixed = stage_sums(options, chunks)
    held = np.array(schedule.in_flight(num_stages, num_microbatches, interleave)) / interleave
    needed = fixed + held * part[:, ACTIVATIONS]
    own = part[:, MICROBATCH]
    sent = np.where(near, *(options.transfer(close)[:, last].sum(axis=2) for close in (True, False)))
    fill = own
    if num_microbatches >= schedule.full_from * num_stages:
        fill = schedule.fill(own, 0.0, part[:, WEIGHTS], interleave)  # type: ignore[arg-type, assignment]
    adds = fill + sent / interleave
    rest = (num_microbatches - 1) * np.maximum(own, sent) + (own - fill) + once
    fits = needed <= options.limit
    stage = np.arange(num_stages)
    _, free_s = _quickest(adds, rest)
    if not fits.any(axis=0).all():
        option = needed.argmin(axis=0)
        return PricedPipeline(np.inf, option, needed[option, stage], free_s)
    option, total_s = _quickest(np.where(fits, adds, np.inf), np.where(fits, rest, np.inf))
    return PricedPipeline(total_s, option, needed[option, stage], free_s)


def _quickest(adds: Floats, rest: Floats) -> tuple[Ints, float]:
    """The option of each stage, as of `choose`, and the time of a step."""
    option, stage = choose(adds, rest), np.arange(adds.shape[1])
    return option, float(adds[option, stage].sum() + rest[option, stage].max())


def stage_sums(options: Options, chunks: tuple[Ints, Ints]) -> tuple[Floats, Floats, Floats]:
    """Sums over the layers of stages, for each option.

    Returns:
        The rows of `kernels` by option, row and stage; by option and stage the seconds spent once a step, and the bytes
        needed whatever the number of microbatches in flight.
    """
    first, last = chunks
    part = (options.sums[:, :, last] - options.sums[:, :, first]).sum(axis=3)
    fixed, once = part[:, STATE] + _most(options.transient, first, last), part[:, ONCE].copy()
    for tie, (owner, other) in enumerate(options.ties):
        owns, copies = (((first <= layer) & (layer < last)).any(axis=1) for layer in (owner, other))
        once += np.outer(options.tie_s[:, tie], owns != copies)
        fixed += np.outer(options.tie_bytes[:, tie], copies & ~owns)
    for step in range(options.ways.shape[1]):
        ways = options.ways[:, step, :, :, None]
        times = (ways[:, :, 0] + ways[:, :, 1] * np.maximum(part[:, None, GRADIENTS], 1e-30)).min(axis=1)
        once += np.where(part[:, GRADIENTS] > 0, times, 0.0)
    return part, once, fixed


def choose(adds: Floats, rest: Floats) -> Ints:
    """For each stage the option, such that Σ adds + max rest over the stages is least.

    As in `unequal_stages`, the maximum is fixed first and lowered until nothing is feasible; ties take the least
    rest.

    Args:
        adds, rest: For each option and stage; infinite where it does not fit.
    """
    stage, best_s, limit = np.arange(adds.shape[1]), np.inf, np.inf
    found = np.zeros(adds.shape[1], np.int64)
    while True:
        least = np.where(rest <= limit, adds, np.inf)
        option = np.where(least == least.min(axis=0), rest, np.inf).argmin(axis=0)
        total, most = least[option, stage].sum(), rest[option, stage].max()
        if not total + most < np.inf:
            return found
        if total + most < best_s:
            best_s, found = total + most, option
        limit = min(np.nextafter(most, -np.inf), best_s - total)


def _most(transient: Floats, first: Ints, last: Ints) -> Floats:
    """For each option and stage, the largest need of any of its layers."""
    stages = zip(first.tolist(), last.tolist(), strict=True)
    found = [[transient[:, a:b].max(axis=1) for a, b in zip(*stage, strict=True)] for stage in stages]
    return np.array(found).max(axis=1).T


def equal_stages(num_devices: int, devices_per_host: int, num_layers: int) -> Iterator[tuple[int, int]]:
    """Numbers of equal stages that a cluster of equal hosts allows, with the devices of each."""
    for num_stages in range(1, min(num_devices, num_layers) + 1):
        each, left = divmod(num_devices, num_stages)
        if not left and (devices_per_host % each == 0 or each % devices_per_host == 0):
            yield num_stages, each


def check_recipe(recipe: ThreeD, catalogue: Catalogue, trains: bool) -> tuple[int, int]:
    """Devices of a stage and rows of a microbatch, if the recipe suits the cluster, the model and the batch.

    Raises:
        ShardingError: It does not.
    """
    cluster, batch = catalogue.cluster, catalogue.rows.batch
    devices = recipe.data * recipe.tensor
    shape = f"data={recipe.data} × tensor={recipe.tensor} × pipeline={recipe.pipeline}"
    if cluster.mixed:
        raise ShardingError(f"{recipe.name} needs equal hosts, and {cluster.name!r} has several kinds: use mw.Auto")
    if trains == (recipe.schedule == "inference"):
        word = "takes a gradient" if trains else "takes no gradient"
        raise ShardingError(f"the function {word}, which schedule {recipe.schedule!r} is not for; choose another one")
    if devices * recipe.pipeline != cluster.num_devices:
        raise ShardingError(
            f"{shape} is {devices * recipe.pipeline} devices, but cluster {cluster.name!r} has {cluster.num_devices}; "
            "choose numbers whose product that is"
        )
    per_host = cluster.devices_per_host
    if per_host % devices and devices % per_host:
        raise ShardingError(
            f"{shape}: a stage of {devices} devices is neither an equal part of a host nor whole hosts of {per_host}; "
            "choose another number of stages"
        )
    chunks, num_layers = recipe.pipeline * recipe.interleave, catalogue.layers.num_layers
    if chunks > num_layers:
        raise ShardingError(
            f"pipeline={recipe.pipeline} × interleave={recipe.interleave} is {chunks} chunks, but the model has "
            f"{num_layers} layers; use at most {num_layers}"
        )
    rows = recipe.data * recipe.microbatch
    if batch % rows:
        raise ShardingError(
            f"a batch of {batch} rows does not divide into microbatches of {rows} (data={recipe.data} × microbatch="
            f"{recipe.microbatch}); use a batch that is a multiple of {rows}, or another microbatch"
        )
    if recipe.tensor not in catalogue.tensor_sizes(0, devices):
        legal = ", ".join(map(str, catalogue.tensor_sizes(0, cluster.num_devices)))
        raise ShardingError(f"tensor={recipe.tensor} does not suit cluster {cluster.name!r}: choose one of {legal}")
    return devices, rows
