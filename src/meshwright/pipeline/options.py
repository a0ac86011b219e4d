"""The ways to split a stage on one submesh, each as sums over layers, so that any range is priced by a subtraction."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.hardware import Mesh
from meshwright.pipeline.catalogue import TENSOR, Catalogue, submesh
from meshwright.pipeline.flow import Array
from meshwright.pipeline.prices import Item, LayerPrices
from meshwright.pipeline.transfer import exchange_s

CHECKPOINTS = ("none", "selective", "full")


@dataclass(frozen=True)
class Option:
    """One way to split a stage.

    Attributes:
        mesh: Its view: replicas of the batch, then the inner axis.
        way: What the inner axis does: a name of `catalogue`.
        spreads: Whether the optimizer's state is spread over the replicas (ZeRO-1).
        checkpoint: What is computed again: ``none``, ``selective`` or ``full``.
        prices: The layers' prices on the inner axis.
    """

    mesh: Mesh
    way: str
    spreads: bool
    checkpoint: str
    prices: LayerPrices

    @property
    def data(self) -> int:
        return self.mesh.sizes[0]

    @property
    def inner(self) -> int:
        return self.mesh.sizes[1]

    def again(self, items: Array) -> tuple[Array, Array]:
        """Compute and communication that each layer repeats in the backward pass, but for what the user repeats."""
        if self.checkpoint == "none":
            return np.zeros(items.shape[1:]), np.zeros(items.shape[1:])
        work = (Item.FORWARD, Item.FORWARD_SENT) if self.checkpoint == "full" else (Item.AGAIN, Item.AGAIN_SENT)
        compute, sent = items[list(work)] - items[[Item.REPEATED, Item.REPEATED_SENT]]
        return np.maximum(compute, 0.0), np.maximum(sent, 0.0)

    def held(self, items: Array) -> Array:
        """Bytes that are held for each microbatch in flight."""
        item = {"none": Item.HELD_BYTES, "selective": Item.KEPT_BYTES, "full": Item.INPUT_BYTES}[self.checkpoint]
        return items[item]

    @cached_property
    def transient(self) -> Array:
        """Bytes that each layer needs while it works: with recomputation, what it makes again, too."""
        items = self.prices.items
        return items[Item.TRANSIENT_BYTES] + items[Item.HELD_BYTES] - self.held(items)

    def state_bytes(self, items: Array) -> Array:
        """Parameters, their gradients and copies, and the optimizer's state."""
        parts = self.data if self.spreads else 1
        return 2 * items[Item.PARAMETER_BYTES] + items[Item.COPY_BYTES] + items[Item.OPTIMIZER_BYTES] / parts

    def update_s(self, items: Array) -> Array:
        """Compute of the optimizer."""
        return items[Item.UPDATE] / (self.data if self.spreads else 1)

    @property
    def collectives(self) -> tuple[str, ...]:
        """What brings the gradients of all replicas together, and new parameters back to them."""
        if self.data == 1:
            return ()
        return ("reduce_scatter", "all_gather") if self.spreads else ("all_reduce",)


class Options:
    """All ways to split a stage on one submesh with one size of microbatch, as the kernel reads them."""

    def __init__(self, catalogue: Catalogue, group: int, options: list[Option]):
        self.options = options
        self.group = group
        self._catalogue = catalogue
        pairs = catalogue.tied
        self.ties = np.array([pair[:2] for pair in pairs], np.int64).reshape(-1, 2)
        local = [[o.prices.local_bytes[v] for _, _, v in pairs] for o in options]
        self.tie_bytes = np.array(local, float).reshape(len(options), len(pairs))
        self.tie_s = np.array([[exchange_s(catalogue.cluster, size) for size in row] for row in self.tie_bytes])
        self.tie_s = self.tie_s.reshape(len(options), len(pairs))
        self.sums = np.array([_sums(option) for option in options])
        self.transient = np.array([option.transient for option in options])
        self.ways = _ways(options)

    @property
    def limit(self) -> float:
        return self._catalogue.limits[self.group]


def find_options(
    catalogue: Catalogue, group: int, num_devices: int, rows: int, checkpoint: str, tensor: int | None = None
) -> Options | None:
    """The ways to split a stage on some devices, ``rows`` being those of a whole microbatch; None if there are none.

    Args:
        catalogue: The prices.
        group: Number of the group of hosts.
        num_devices: Devices of the submesh.
        rows: Rows of a microbatch.
        checkpoint: What is computed again.
        tensor: Only this inner size, with weights split over it; all sizes and ways by default.
    """
    machines = submesh(catalogue.cluster.groups[group], num_devices)
    found = []
    for inner, way in [(tensor, TENSOR)] if tensor else catalogue.ways(group, num_devices):
        data = num_devices // inner
        prices = None if rows % data else catalogue.prices(group, inner, way, rows // data)
        if prices is not None:
            mesh = machines.mesh((data, inner))
            spreads = (False, True) if data > 1 else (False,)
            found += [Option(mesh, way, spread, checkpoint, prices) for spread in spreads]
    return Options(catalogue, group, found) if found else None


def _sums(option: Option) -> Array:
    """The rows that `kernel.price_ranges` takes, up to each layer."""
    items = option.prices.items
    compute, sent = option.again(items)
    works = items[[Item.FORWARD, Item.FORWARD_SENT, Item.BACKWARD, Item.BACKWARD_SENT]].sum(axis=0)
    once = items[Item.GRADIENTS_SENT] + items[Item.UPDATE_SENT] + option.update_s(items)
    back = items[Item.BACKWARD] + items[Item.BACKWARD_SENT] + compute + sent - items[Item.WEIGHTS]
    rows = [
        works + compute + sent,
        np.minimum(items[Item.WEIGHTS], np.minimum(items[Item.FORWARD] + items[Item.FORWARD_SENT], back)),
        once,
        items[Item.PARAMETER_BYTES],
        option.state_bytes(items),
        option.held(items),
    ]
    return np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)


def _ways(options: list[Option]) -> Array:
    """The ways of each option's collectives, as many for each: what is missing never wins, or costs nothing."""
    found = [[option.mesh.alternatives(kind, (0,)) for kind in option.collectives] for option in options]
    most = max((len(ways) for steps in found for ways in steps), default=1)
    table = np.zeros((len(options), 2, most, 2))
    for row, steps in zip(table, found, strict=True):
        for place, ways in zip(row, steps, strict=False):
            place[:] = np.inf
            place[: len(ways)] = ways
    return table
