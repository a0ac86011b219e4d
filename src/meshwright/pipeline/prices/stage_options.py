"""The ways to split a stage on one submesh, each as sums over layers, so that any range is priced by a subtraction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.arrays import Bools, Floats, Ints
from meshwright.cost.sustained import sustained_s, sustained_ways
from meshwright.hardware import Mesh
from meshwright.pipeline.prices.catalogue import TENSOR, Catalogue, View, Way, submesh
from meshwright.pipeline.prices.kernels import ACTIVATIONS, GRADIENTS, MICROBATCH, ONCE, STATE, WEIGHTS, price_ranges
from meshwright.pipeline.prices.layer_prices import Item, LayerPrices
from meshwright.pipeline.prices.transfer import crossing_bytes, exchange_s, send_s
from meshwright.plans.stage import EXCHANGED

CHECKPOINTS = ("none", "selective", "full")
_RANKS = 4  # options per range for which space is allocated at first


@dataclass(frozen=True)
class Option:
    """One way to split a stage.

    Attributes:
        mesh: Its devices: replicas of the batch, then the axes of a replica's view.
        way: How the axes of the view are used.
        zero: The ZeRO stage: 1 shards the optimizer's state over the replicas, 2 gradients as well, 3 parameters as
            well (FSDP).
        checkpoint: The activation recomputation: ``none``, ``selective`` or ``full``.
        prices: The layers' prices on the view.
    """

    mesh: Mesh
    way: Way
    zero: int
    checkpoint: str
    prices: LayerPrices

    @property
    def data(self) -> int:
        return self.mesh.sizes[0]

    @property
    def inner(self) -> int:
        return self.mesh.num_devices // self.data

    @property
    def view(self) -> View:
        """Sizes of the axes inside a replica."""
        return self.mesh.sizes[1:]

    def again(self, items: Floats) -> tuple[Floats, Floats]:
        """Compute and communication that each layer repeats in the backward pass, beyond the user's own checkpoints."""
        if self.checkpoint == "none":
            return np.zeros(items.shape[1:]), np.zeros(items.shape[1:])
        work = (Item.FORWARD, Item.FORWARD_SENT) if self.checkpoint == "full" else (Item.AGAIN, Item.AGAIN_SENT)
        compute, sent = items[list(work)] - items[[Item.REPEATED, Item.REPEATED_SENT]]
        return np.maximum(compute, 0.0), np.maximum(sent, 0.0)

    def held(self, items: Floats) -> Floats:
        """Bytes that are held for each microbatch in flight."""
        item = {"none": Item.HELD_BYTES, "selective": Item.KEPT_BYTES, "full": Item.INPUT_BYTES}[self.checkpoint]
        return items[item]

    @cached_property
    def transient(self) -> Floats:
        """Bytes of temporaries that each layer needs while it runs, recomputed activations included.

        State that is sharded over the replicas is gathered while its layer runs.
        """
        items = self.prices.items
        needed = items[Item.TRANSIENT_BYTES] + items[Item.HELD_BYTES] - self.held(items)
        needed += items[Item.GRADIENT_BYTES] if self.zero > 1 else 0.0
        return needed + (items[Item.READ_BYTES] + items[Item.COPY_BYTES] if self.zero > 2 else 0.0)

    def parts(self, stage: int) -> int:
        """The number of devices that shard the state which ZeRO shards from a given ZeRO stage on."""
        return self.data if self.zero >= stage else 1

    def state_bytes(self, items: Floats) -> Floats:
        """Parameters, their gradients and copies, and the optimizer's state."""
        weights = (items[Item.PARAMETER_BYTES] + items[Item.COPY_BYTES]) / self.parts(3)
        return weights + items[Item.GRADIENT_BYTES] / self.parts(2) + items[Item.OPTIMIZER_BYTES] / self.parts(1)

    def tied_bytes(self, num_bytes: float) -> float:
        """Bytes that a copy of another stage's parameter takes, with its gradient."""
        return num_bytes / self.parts(3) + self.trains * num_bytes / self.parts(2)

    def update_s(self, items: Floats) -> Floats:
        """Compute of the optimizer."""
        return items[Item.UPDATE] / self.parts(1)

    def exchanged(self, items: Floats) -> tuple[Floats, Floats]:
        """Communication between replicas for each layer and microbatch: in the forward and in the backward pass.

        Sharded parameters are gathered for each pass, and sharded gradients are reduce-scattered after each.
        """
        fetched = returned = np.zeros(items.shape[1:])
        if self.zero > 1:
            returned = sustained_s(self.mesh, "reduce_scatter", (0,), items[Item.GRADIENT_BYTES])
        if self.zero > 2:
            fetched = sustained_s(self.mesh, "all_gather", (0,), items[Item.READ_BYTES])
        return fetched, returned + self.trains * fetched

    @property
    def trains(self) -> bool:
        return bool(self.prices.items[Item.GRADIENT_BYTES].any())

    @property
    def collectives(self) -> tuple[str, ...]:
        """The collectives that sum the gradients of all replicas once a step and return new parameters to them."""
        if self.data == 1:
            return ()
        return EXCHANGED[self.zero][0]


class Pace(NamedTuple):
    """The properties of a pipeline on which the price of a single stage depends.

    Attributes:
        most: The largest number of microbatches in flight.
        num_microbatches: The number of microbatches in a step.
        hides: How often a stage's weights' gradients fill a gap of the pipeline.
        floor: The least time that the layers up to each add to the fill of the pipeline.
        best_s: The time of the incumbent.
    """

    most: int
    num_microbatches: int
    hides: float
    floor: Floats
    best_s: float


class Options:
    """All ways to split a stage on one submesh with one size of microbatch, as the kernel reads them."""

    def __init__(self, catalogue: Catalogue, group: int, options: list[Option], num_rows: int):
        self.options, self.num_rows = options, num_rows  # rows of a whole microbatch
        self.group = group
        self._catalogue = catalogue
        pairs = catalogue.tied
        self.ties = np.array([pair[:2] for pair in pairs], np.int64).reshape(-1, 2)
        local = [[o.prices.local_bytes[v] for _, _, v in pairs] for o in options]
        shape, rows = (len(options), len(pairs)), list(zip(options, local, strict=True))
        self.tie_bytes = np.array([[o.tied_bytes(size) for size in row] for o, row in rows]).reshape(shape)
        self.tie_s = np.array([[exchange_s(catalogue.cluster, size) for size in row] for row in local]).reshape(shape)
        self.sums = np.array([_sums(option, catalogue.rows.batch // num_rows) for option in options])
        self.transient = np.array([option.transient for option in options])
        self.ways = _ways(options)
        self._ranks = _RANKS  # the largest number needed so far
        self._transfers: dict[bool, Floats] = {}

    @property
    def num_layers(self) -> int:
        return self.transient.shape[1]

    @property
    def work(self) -> Floats:
        """The least time that each layer takes in a step: forward and backward passes, and what is done once."""
        num_microbatches = self._catalogue.rows.batch // self.num_rows
        found: Floats = np.diff(num_microbatches * self.sums[:, MICROBATCH] + self.sums[:, ONCE]).min(axis=0)
        return found

    @property
    def limit(self) -> float:
        return self._catalogue.limits[self.group]

    def least_fill(self, hides: float) -> Floats:
        """The least time that each layer adds to the fill of the pipeline, over all options."""
        return np.diff(self.sums[:, MICROBATCH] - hides * self.sums[:, WEIGHTS]).min(axis=0)

    def least_s(self, num_microbatches: int, share: float) -> Floats:
        """For each layer, a lower bound on its part of the time of a step, whatever its option and its stage.

        With T = Σ fill + max busy, every stage ``s`` gives the bound T ≥ fill_s + busy_s + Σ fill of the others. The
        mean of these bounds over the stages, weighted by their shares of the cluster, is a sum over layers if the fixed
        times of collectives are left out; and a layer adds at least its fill under the best of all schedules.

        Args:
            num_microbatches: How many.
            share: The submesh's part of the cluster.
        """
        by_layer = np.diff(self.sums)  # option, row, layer
        own, weights = by_layer[:, MICROBATCH], by_layer[:, WEIGHTS]
        rates = self.ways[..., 1].min(axis=2).sum(axis=1)  # of the collectives, per byte
        once = by_layer[:, ONCE] + rates[:, None] * by_layer[:, GRADIENTS]
        chunks = max(own.shape[1] // 2, 1)  # in the finest interleaved pipeline, which has two stages
        adds = np.minimum(own - 2 * weights, own / chunks)
        return (share * (num_microbatches * own + once) + (1 - share) * adds).min(axis=0)

    def least_bytes(self, most: int) -> Floats:
        """The least bytes that any option needs for a range: by microbatches in flight (minus one), and layers."""
        fixed, held = self._needs(slice(None))
        return np.array([(fixed + (number + 1) * held).min(axis=0) for number in range(most)])

    def fits(self, number: int, in_flight: Sequence[int], interleave: int) -> Bools:
        """Whether ranges fit by one option: by stage, first layer and end.

        Args:
            number: The option's.
            in_flight: For each stage, the microbatches (times chunks) that it holds.
            interleave: The chunks of a stage; each may need its share of the memory.
        """
        fixed, held = self._needs(slice(number, number + 1))
        found: Bools = interleave * fixed + np.array(in_flight)[:, None, None] * held <= self.limit
        return found

    def _needs(self, some: slice) -> tuple[Floats, Floats]:
        """Bytes that ranges need by some options, and bytes for each microbatch: by option, first layer and end."""
        sums, transient = self.sums[some], self.transient[some]
        num_options, num_layers = transient.shape
        fixed, held = np.full((2, num_options, num_layers, num_layers + 1), np.inf)
        for first in range(num_layers):
            part = sums[:, :, first + 1 :] - sums[:, :, first, None]
            peak = np.maximum.accumulate(transient[:, first:], axis=1)
            fixed[:, first, first + 1 :], held[:, first, first + 1 :] = part[:, STATE] + peak, part[:, ACTIVATIONS]
        inside = np.arange(num_layers)[:, None], np.arange(num_layers + 1)
        for (owner, other), size in zip(self.ties.tolist(), self.tie_bytes[some].T, strict=True):
            owns, copies = ((inside[0] <= layer) & (layer < inside[1]) for layer in (owner, other))
            fixed += size[:, None, None] * (copies & ~owns)
        return fixed, held

    def transfer(self, near: bool) -> Floats:
        """For each option, seconds, there and back, over the cut before each layer and after the last.

        Args:
            near: Whether the stage sends inside its host.
        """
        if near not in self._transfers:
            catalogue, found = self._catalogue, []
            for option in self.options:
                devices = option.mesh.num_devices
                share = self.num_rows / catalogue.rows.batch / devices
                found.append(
                    2
                    * send_s(catalogue.cluster, *crossing_bytes(catalogue.layers, option.prices, share), near, devices)
                )
            self._transfers[near] = np.array(found)
        return self._transfers[near]

    def price(self, pace: Pace) -> tuple[Floats, Floats, Ints]:
        """The fill, the busy time and the option of every range: by rank, microbatches in flight, and layers.

        All stages send over the links between hosts here.
        """
        num_layers, ranks = self.num_layers, 0
        while self._ranks > ranks:
            ranks = self._ranks
            shape = (ranks, pace.most, num_layers, num_layers + 1)
            tables = np.full(shape, np.inf), np.full(shape, np.inf), np.full(shape, -1)
            work = self.sums, self.transient, self.ways, self.ties, self.tie_bytes, self.tie_s
            sent = self.transfer(near=False)
            found = price_ranges(
                *work, sent, self.limit, pace.num_microbatches, pace.hides, pace.floor, pace.best_s, *tables
            )
            self._ranks = max(ranks, found)
        return tables[0][:found], tables[1][:found], tables[2][:found]


def find_options(
    catalogue: Catalogue, group: int, num_devices: int, rows: int, checkpoint: str, tensor: int | None = None
) -> Options | None:
    """The ways to split a stage on a submesh, or None if there are none.

    Args:
        catalogue: The prices.
        group: Number of the group of hosts.
        num_devices: Devices of the submesh.
        rows: Rows of a whole microbatch.
        checkpoint: The activation recomputation.
        tensor: Consider only weights split over this many devices; all views and ways by default.
    """
    machines = submesh(catalogue.cluster.groups[group], num_devices)
    found: list[Option] = []
    for view, way in [((tensor,), TENSOR)] if tensor else catalogue.ways(group, num_devices, rows):
        data = num_devices // math.prod(view)
        prices = None if rows % data else catalogue.prices(group, view, way, rows // data)
        if prices is not None and not any(_alike(option, view, prices) for option in found):
            option = Option(machines.mesh((data, *view)), way, 0, checkpoint, prices)
            found += _spread(option, catalogue, catalogue.rows.batch // rows, catalogue.limits[group])
    return Options(catalogue, group, found, rows) if found else None


def _alike(option: Option, view: View, prices: LayerPrices) -> bool:
    """Whether another way gives the same split as an option does on its view."""
    return option.view == view and np.array_equal(option.prices.items, prices.items)


def _spread(option: Option, catalogue: Catalogue, num_microbatches: int, limit: float) -> list[Option]:
    """An option at each ZeRO stage that memory may call for.

    Sharded gradients or parameters are exchanged for every microbatch instead of once a step. The time saved once a
    step is at most the time lost in a single microbatch, so a higher ZeRO stage is never quicker.
    """
    if option.data == 1:
        return [option]
    found = [replace(option, zero=stage) for stage in ((0, 1) if option.trains else (0,))]
    items = option.prices.items
    needed = found[-1].state_bytes(items.sum(axis=1)) + option.transient.max()
    needed += num_microbatches * (option.held(items) + items[Item.DATA_BYTES]).sum()
    needed += sum(option.tied_bytes(option.prices.local_bytes[v]) for _, _, v in catalogue.tied)
    if needed > limit:  # all layers with all microbatches in flight: more than any stage needs
        found += [replace(option, zero=stage) for stage in ((2, 3) if option.trains else (3,))]
    return found


def _sums(option: Option, num_microbatches: int) -> Floats:
    """The rows that `kernel.price_ranges` takes, up to each layer; the whole batch counts as state."""
    items = option.prices.items
    compute, sent = option.again(items)
    works = items[[Item.FORWARD, Item.FORWARD_SENT, Item.BACKWARD, Item.BACKWARD_SENT]].sum(axis=0)
    fetched, returned = option.exchanged(items)
    once = items[Item.GRADIENTS_SENT] + items[Item.UPDATE_SENT] + option.update_s(items)
    forward = items[Item.FORWARD] + items[Item.FORWARD_SENT] + fetched
    back = items[Item.BACKWARD] + items[Item.BACKWARD_SENT] + returned + compute + sent - items[Item.WEIGHTS]
    rows = [
        works + fetched + returned + compute + sent,
        np.minimum(items[Item.WEIGHTS], np.minimum(forward, back)),
        once,
        items[Item.GRADIENT_BYTES],
        option.state_bytes(items) + num_microbatches * items[Item.DATA_BYTES],
        option.held(items),
    ]
    return np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)


def _ways(options: list[Option]) -> Floats:
    """The algorithms of each option's collectives, padded with entries that never win or cost nothing."""
    found = [[sustained_ways(option.mesh, kind, (0,)) for kind in option.collectives] for option in options]
    most = max((len(ways) for steps in found for ways in steps), default=1)
    table = np.zeros((len(options), 2, most, 2))
    for row, steps in zip(table, found, strict=True):
        for place, ways in zip(row, steps, strict=False):
            place[:] = np.inf
            place[: len(ways)] = ways
    return table
