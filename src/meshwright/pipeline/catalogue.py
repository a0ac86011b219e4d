"""Prices of all layers, by kind of host, view and rows of a microbatch; each is worked out when first asked for.

A stage's devices are seen as ``data × inner``: the batch of a microbatch is split over the first axis, and what the
second one does is the intra-op planner's choice. Replicas along the first axis do the same work, so a price depends on
the inner axis and on the rows that one replica works on, and a handful of solves serves clusters of any size. Rows are
priced on a grid; between two of its points all is taken to be linear, for every method alike.
"""

from collections.abc import Callable
from functools import cached_property

from meshwright.hardware import Cluster, Mesh
from meshwright.hardware.torus import divisors
from meshwright.pipeline.layers import Layers
from meshwright.pipeline.prices import Item, LayerPrices, Pricing
from meshwright.pipeline.rows import Rows
from meshwright.planner.methods import Auto, Method, TensorParallel
from meshwright.planner.roles import find_roles

FREE, TENSOR, LEAN = "free", "tensor", "lean"
_WAYS: dict[str, tuple[Method, bool]] = {
    FREE: (Auto(), False),  # the fastest
    LEAN: (Auto(), True),  # the one that needs least memory
    TENSOR: (TensorParallel(), False),  # weights split, as in Megatron-LM
}
_SMALL_ROWS = 4  # this many of the smallest sizes of microbatch are priced, and
_LARGE_ROWS = 2  # this many of the others
_MORE_HOSTS = (2, 4, 8)  # hosts over which weights may be split, up to
_MOST_INNER = 16  # devices, or two hosts if that is more


class Catalogue:
    """The prices of one model on one cluster."""

    def __init__(
        self, rows: Rows, layers: Layers, cluster: Cluster, memory_fraction: float, say: Callable[[str], None]
    ):
        self.rows, self.layers, self.cluster, self.say = rows, layers, cluster, say
        self.limits = [memory_fraction * group.memory_bytes for group in cluster.groups]
        self.num_solves = 0
        self._pricings: dict[int, Pricing | None] = {}
        self._known: dict[tuple[int, int, str, int], LayerPrices | None] = {}

    @cached_property
    def microbatches(self) -> list[int]:
        """Rows that a microbatch may have: those that divide the batch."""
        return divisors(self.rows.batch) if self.rows.resizes else [self.rows.batch]

    @cached_property
    def grid(self) -> list[int]:
        """The rows that are priced: some of those that leave all sizes whole."""
        sizes = [n for n in self.microbatches if self.rows.at(n) is not None]
        small, large = sizes[:_SMALL_ROWS], sizes[_SMALL_ROWS:]
        if len(large) > _LARGE_ROWS:
            large = [large[round((i + 1) * (len(large) - 1) / _LARGE_ROWS)] for i in range(_LARGE_ROWS)]
        return [*small, *large]

    def inner_sizes(self, group: int, num_devices: int) -> list[int]:
        """Sizes that the inner axis may have on a submesh: part of a host, or a few whole ones."""
        per_host = self.cluster.groups[group].devices_per_host
        most = max(_MOST_INNER, 2 * per_host)
        sizes = [*divisors(per_host), *(per_host * n for n in _MORE_HOSTS)]
        return [k for k in sizes if k <= most and num_devices % k == 0]

    def ways(self, group: int, num_devices: int) -> list[tuple[int, str]]:
        """What may be done on a submesh: sizes of the inner axis, each with what it does.

        With one device all is the same, and over several hosts nothing but splitting weights differs from replicas.
        """
        per_host, found = self.cluster.groups[group].devices_per_host, []
        for k in self.inner_sizes(group, num_devices):
            found += [(k, way) for way in ((FREE,) if k == 1 else (TENSOR,) if k > per_host else tuple(_WAYS))]
        return found

    @cached_property
    def tied(self) -> list[tuple[int, int, int]]:
        """Parameters that several layers read: the owner's layer, another one's, the value."""
        places, first = self.layers.places, self.layers.first
        parameters, found = set(find_roles(self.rows.whole).parameters), []
        for value, units in places.arguments.items():
            layers = sorted({int(first[unit]) for unit in units})
            found += [(layers[0], other, value) for other in layers[1:] if value in parameters]
        return found

    def prices(self, group: int, inner: int, way: str, rows: int) -> LayerPrices | None:
        """The layers' prices with so many rows for each replica; None where that cannot be, or can never fit."""
        way = FREE if inner == 1 else way
        if rows in self.grid:
            return self._priced(group, inner, way, rows)
        below = max((n for n in self.grid if n < rows), default=None)
        above = min((n for n in self.grid if n > rows), default=None)
        if below is None or above is None:
            return None
        low, high = (self._priced(group, inner, way, n) for n in (below, above))
        if low is None or high is None or rows % low.batch_parts or rows % high.batch_parts:
            return None
        share = (rows - below) / (above - below)
        items = low.items + share * (high.items - low.items)
        return LayerPrices(items, low.batch_parts, low.specs, low.local_bytes)

    def _priced(self, group: int, inner: int, way: str, rows: int) -> LayerPrices | None:
        key = (group, inner, way, rows)
        if key not in self._known:
            self._known[key] = self._price(*key)
        return self._known[key]

    def _price(self, group: int, inner: int, way: str, rows: int) -> LayerPrices | None:
        place = self.grid.index(rows)
        if place and self._hopeless(self._priced(group, inner, way, self.grid[place - 1]), group):
            return None
        pricing = self._pricing(rows)
        if pricing is None:
            return None
        method, lean = _WAYS[way]
        self.num_solves += 1
        return pricing.price(self._mesh(group, inner), method, lean)

    def _hopeless(self, fewer: LayerPrices | None, group: int) -> bool:
        """Whether not even fewer rows fit, whatever is kept for the backward pass."""
        return fewer is None or bool(fewer.items[Item.TRANSIENT_BYTES].max() > self.limits[group])

    def _pricing(self, rows: int) -> Pricing | None:
        if rows not in self._pricings:
            self.say(f"pricing {self.layers.num_layers} layers with {rows} rows")
            resized = self.rows.at(rows)
            self._pricings[rows] = None if resized is None else Pricing(resized, self.layers)
        return self._pricings[rows]

    def _mesh(self, group: int, inner: int) -> Mesh:
        machines = self.cluster.groups[group]
        return submesh(machines, inner).mesh((inner,))


def submesh(machines: Cluster, num_devices: int) -> Cluster:
    """Some devices of equal hosts: part of one of them, or several whole ones."""
    per_host = machines.devices_per_host
    if num_devices <= per_host:
        return machines.part(1, num_devices)
    return machines.part(num_devices // per_host, per_host)
