"""Prices of all layers, by kind of host, view and rows of a microbatch; each is computed on first use.

A stage's devices form a mesh ``data × view``: the batch of a microbatch is split over the first axis, and the intra-op
planner chooses the use of the one or two axes of the view. Replicas along the first axis do the same work, so a price
depends only on the view and on the rows of one replica, and a handful of solves suffices for clusters of any size.
Prices are computed on a grid of rows and interpolated linearly between its points, for every method alike.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, lru_cache

import numpy as np

from meshwright.hardware import Cluster
from meshwright.hardware.clusters import mixed
from meshwright.hardware.torus import divisors
from meshwright.pipeline.layers.batch_sizes import ResizableBatch
from meshwright.pipeline.layers.layers import Layers
from meshwright.pipeline.prices.layer_prices import ALL_SECONDS, Item, LayerPrices
from meshwright.pipeline.prices.layer_pricing import Pricing
from meshwright.pipeline.prices.stage_problem import FREE, LEAN, STEADY, TENSOR, WAYS, Own, Way, price_way
from meshwright.planner.grouping.roles import find_roles

View = tuple[int, ...]  # sizes of the axes inside a replica


_SMALL_ROWS = 4  # number of the smallest sizes of microbatch that are priced
_LARGE_ROWS = 2  # number of the larger sizes that are priced
_MORE_HOSTS = (2, 4, 8)  # hosts over which a view may run; recipes may have more
_MOST_INNER = 16  # devices, or two hosts if that is more: larger views are tried with few sizes of microbatch
_MOST_SQUARES = 4  # views of two axes inside a host


class Catalogue:
    """The prices of one model on one cluster.

    Attributes:
        limits: The modelled bytes that a device of each group of hosts may need.
        needed: How many bytes stages were found to need for each that is modelled.
    """

    def __init__(
        self,
        rows: ResizableBatch,
        layers: Layers,
        cluster: Cluster,
        memory_fraction: float,
        say: Callable[[str], None],
        needed: float = 1.0,
    ):
        self.rows, self.layers, self.cluster, self.say, self.needed = rows, layers, cluster, say, needed
        self.limits = [memory_fraction * group.memory_bytes / needed for group in cluster.groups]
        self.num_solves, self._num_devices = 0, cluster.num_devices
        self._prunes = True
        self._pricings: dict[int, Pricing | None] = {}
        self._known: dict[tuple[Cluster, View, Way, int], LayerPrices | None] = {}
        self._widened: set[int] = set()  # rows of microbatches for which views may span many hosts
        self._own: dict[tuple[Cluster, View, int], list[Own]] = {}  # by rows of a replica
        self._solved: dict[tuple[Cluster, View, Way, int], LayerPrices | None] = {}

    def unpruned(self) -> "Catalogue":
        """The same catalogue, which also prices options that can never fit."""
        other = copy(self)
        other._prunes, other._known = False, {}
        return other

    def part(self, groups: Sequence[int]) -> "Catalogue":
        """The catalogue of some groups of hosts as a cluster of their own; both share their prices."""
        other, kept = copy(self), [self.cluster.groups[number] for number in groups]
        other.cluster = mixed(" + ".join(group.name for group in kept), kept)
        other.limits = [self.limits[number] for number in groups]
        return other

    @cached_property
    def microbatches(self) -> list[int]:
        """The legal numbers of rows of a microbatch: the divisors of the batch."""
        return divisors(self.rows.batch) if self.rows.resizes else [self.rows.batch]

    @cached_property
    def grid(self) -> list[int]:
        """The numbers of rows that are priced: a subset of the numbers for which all sizes remain integers."""
        sizes = [n for n in self.microbatches if self.rows.at(n) is not None]
        small, large = sizes[:_SMALL_ROWS], sizes[_SMALL_ROWS:]
        if len(large) > _LARGE_ROWS:
            large = [large[round((i + 1) * (len(large) - 1) / _LARGE_ROWS)] for i in range(_LARGE_ROWS)]
        return [*small, *large]

    def tensor_sizes(self, group: int, num_devices: int) -> list[int]:
        """The numbers of devices over which a recipe may split weights on a submesh: part of a host, or whole hosts."""
        per_host = self.cluster.groups[group].devices_per_host
        return [k for k in divisors(num_devices) if per_host % k == 0 or k % per_host == 0]

    def ways(self, group: int, num_devices: int, rows: int) -> list[tuple[View, Way]]:
        """The views of a submesh, each with a use of its axes, that the dynamic programme may choose for ``rows``."""
        machines = self.cluster.groups[group]
        views = _views(machines) + (_wide_views(machines) if rows in self._widened else ())
        found = [(view, way) for view, way in views if num_devices % math.prod(view) == 0]
        for view in dict.fromkeys(view for view, _ in found):
            each = rows * math.prod(view) // num_devices
            found += [(view, way) for way in self._own.get((machines, view, each), ())]
        return found

    def widen(self, rows: int) -> bool:
        """Allows views over more hosts for microbatches of ``rows``; returns False if these were already allowed."""
        new = rows not in self._widened and any(_wide_views(machines) for machines in self.cluster.groups)
        self._widened.add(rows)
        return new

    def add(self, group: int, view: View, way: Own, rows: int) -> bool:
        """Adds a stage's own way to those of a view with ``rows`` per replica; returns False if it is already there."""
        prices, machines = self.prices(group, view, way, rows), self.cluster.groups[group]
        own = self._own.setdefault((machines, view, rows), [])
        ways: list[Way] = [*WAYS, *own]
        known = (self.prices(group, view, other, rows) for other in ways)
        if prices is None or any(other is not None and np.array_equal(prices.items, other.items) for other in known):
            return False
        own.append(way)
        return True

    def least_s(self, group: int, view: View, way: Way) -> float:
        """A lower bound on the step of any pipeline whose stages all use one view and way.

        It is the time of the whole batch as one microbatch with unlimited memory. Time per row falls with the rows:
        every part of a cost is a fixed time plus a proportional one, or a product, whose efficiency grows with its
        size.
        """
        prices = self._solve(group, view, FREE if view == (1,) else way, self.rows.batch)
        if prices is None:
            return 0.0
        return float(prices.items[ALL_SECONDS].sum()) * math.prod(view) / self.cluster.num_devices

    @cached_property
    def tied(self) -> list[tuple[int, int, int]]:
        """Parameters that several layers read: the owner's layer, another one's, the value."""
        places, first = self.layers.places, self.layers.first
        parameters, found = set(find_roles(self.rows.whole).parameters), []
        for value, units in places.arguments.items():
            layers = sorted({int(first[unit]) for unit in units})
            found += [(layers[0], other, value) for other in layers[1:] if value in parameters]
        return found

    def prices(self, group: int, view: View, way: Way, rows: int) -> LayerPrices | None:
        """The layers' prices with ``rows`` per replica, or None if that is infeasible or can never fit."""
        way = FREE if view == (1,) else way
        if rows in self.grid:
            return self._priced(group, view, way, rows)
        below = max((n for n in self.grid if n < rows), default=None)
        above = min((n for n in self.grid if n > rows), default=None)
        if below is None or above is None:
            return None
        low, high = (self._priced(group, view, way, n) for n in (below, above))
        if low is None or high is None or rows % low.batch_parts or rows % high.batch_parts:
            return None
        share = (rows - below) / (above - below)
        items = low.items + share * (high.items - low.items)
        return LayerPrices(items, low.batch_parts, low.specs, low.local_bytes)

    def _priced(self, group: int, view: View, way: Way, rows: int) -> LayerPrices | None:
        if way == STEADY and rows == self.rows.batch:  # there is only one microbatch
            way = FREE
        key = (self.cluster.groups[group], view, way, rows)
        if key not in self._known:
            self._known[key] = self._price(group, view, way, rows)
        return self._known[key]

    def _price(self, group: int, view: View, way: Way, rows: int) -> LayerPrices | None:
        place = self.grid.index(rows)
        if (
            self._prunes
            and place
            and isinstance(way, str)
            and self._hopeless(self._priced(group, view, way, self.grid[place - 1]), group)
        ):
            return None
        return self._solve(group, view, way, rows)

    def _solve(self, group: int, view: View, way: Way, rows: int) -> LayerPrices | None:
        machines = self.cluster.groups[group]
        key = (machines, view, way, rows)
        if key not in self._solved:
            pricing = self._pricing(rows)
            self.num_solves += pricing is not None
            mesh = submesh(machines, math.prod(view)).mesh(view)
            self._solved[key] = None if pricing is None else price_way(pricing, mesh, way)
        return self._solved[key]

    def _hopeless(self, fewer: LayerPrices | None, group: int) -> bool:
        """Whether not even fewer rows fit, whichever activations are kept for the backward pass."""
        return fewer is None or bool(fewer.items[Item.TRANSIENT_BYTES].max() > self.limits[group])

    def _pricing(self, rows: int) -> Pricing | None:
        if rows not in self._pricings:
            self.say(f"pricing {self.layers.num_layers} layers with {rows} rows")
            resized = self.rows.at(rows)
            self._pricings[rows] = None if resized is None else Pricing(resized, self.layers, self._num_devices)
        return self._pricings[rows]


@lru_cache(maxsize=64)
def _views(machines: Cluster) -> tuple[tuple[View, Way], ...]:
    """Views of some of a group's devices, each with a use of its axes.

    On one device all ways are the same. One axis over several hosts splits weights: its other uses are equivalent to
    replicas. Of two axes at most one spans hosts, and their use is free; splitting weights over both is equivalent to
    one axis.
    """
    per_host = machines.devices_per_host
    found: list[tuple[View, Way]] = [((1,), FREE)]
    found += [((k,), way) for k in divisors(per_host) if k > 1 for way in WAYS]
    found += [(view, way) for view in _squares(machines) for way in (FREE, STEADY, LEAN)]
    few = [n for n in _hosts(machines) if per_host * n <= max(_MOST_INNER, 2 * per_host)]
    return (*found, *_over_hosts(per_host, few))


@lru_cache(maxsize=64)
def _wide_views(machines: Cluster) -> tuple[tuple[View, Way], ...]:
    """Views over more hosts than those of `_views`, each with a use of its axes."""
    per_host = machines.devices_per_host
    many = [n for n in _hosts(machines) if per_host * n > max(_MOST_INNER, 2 * per_host)]
    return tuple(_over_hosts(per_host, many))


def _hosts(machines: Cluster) -> list[int]:
    """Numbers of hosts that a view may span."""
    return [n for n in _MORE_HOSTS if n <= machines.num_hosts]


def _over_hosts(per_host: int, hosts: list[int]) -> list[tuple[View, Way]]:
    """Views over some numbers of hosts: one axis for weights, or two, one of them inside the hosts, for any use."""
    found: list[tuple[View, Way]] = [((n * per_host,), TENSOR) for n in hosts]
    if per_host > 1:
        found += [((n, per_host), way) for n in hosts for way in (FREE, STEADY, LEAN)]
    return found


def _squares(machines: Cluster) -> list[View]:
    """Views of two axes inside a host, the most even ones; behind a switch, only one of each pair of transposes."""
    alike = machines.intra.topology == "switch"
    pairs: list[View] = [(a, k // a) for k in divisors(machines.devices_per_host) for a in divisors(k) if 1 < a < k]
    pairs = [pair for pair in pairs if pair[0] <= pair[1] or not alike]
    pairs.sort(key=lambda pair: (max(pair) / min(pair), -math.prod(pair)))
    return pairs[:_MOST_SQUARES]


def submesh(machines: Cluster, num_devices: int) -> Cluster:
    """Some devices of equal hosts: part of one of them, or several whole ones."""
    per_host = machines.devices_per_host
    if num_devices <= per_host:
        return machines.part(1, num_devices)
    return machines.part(num_devices // per_host, per_host)
