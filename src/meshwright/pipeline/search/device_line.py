"""The devices of a cluster in a line, along which stages are placed, and the final devices of each stage."""

from collections.abc import Sequence
from itertools import permutations
from math import gcd

import numpy as np
from numpy.typing import NDArray

from meshwright.hardware import Cluster
from meshwright.hardware.torus import divisors
from meshwright.plans.stage import Submesh

_FINE_DEVICES = 512  # up to here a stage may have part of a host
_MOST_UNITS = 64  # of more hosts, stages take several at a time, if their number has a divisor
_TOO_MANY_UNITS = 256
_MOST_ORDERS = 6


class Line:
    """The groups of hosts one after another; stages are placed along this line.

    Within a group any order suffices: sizes divide each other or are whole hosts, so the largest can be placed first.

    Attributes:
        cluster: The machines.
        unit: Devices that are counted as one.
        num_units: Units of the whole line.
        kinds: Kinds of submesh: group and devices.
    """

    def __init__(self, cluster: Cluster, order: Sequence[int]):
        self.cluster = cluster
        groups, hosts, devices = cluster.groups, cluster.num_hosts, cluster.num_devices
        fine = devices <= _FINE_DEVICES
        step = 1 if hosts <= _MOST_UNITS else _step([g.num_hosts for g in groups], hosts)
        self.unit = 1 if fine else gcd(*(step * g.devices_per_host for g in groups))
        self.num_units = devices // self.unit
        self.kinds: list[tuple[int, int]] = []
        self._edges: dict[int, tuple[int, int]] = {}
        start = 0
        for number in order:
            group, per_host = groups[number], groups[number].devices_per_host
            self._edges[number] = (start, start + group.num_hosts * per_host)
            start = self._edges[number][1]
            parts = [n for n in _chain(per_host) if n < per_host] if fine else []
            self.kinds += [(number, n) for n in parts]
            self.kinds += [(number, n * per_host) for n in range(step, group.num_hosts + 1, step)]

    def allowed(self, group: int, devices: int) -> NDArray[np.bool_]:
        """For each number of units left, whether a stage of ``devices`` devices of a group can come next."""
        start = (self.num_units - np.arange(self.num_units + 1)) * self.unit
        first, last = self._edges[group]
        return (start >= first) & (start + devices <= last)


def _step(hosts: list[int], total: int) -> int:
    """The fewest hosts that are taken at a time so that there are not too many units."""
    steps = divisors(gcd(*hosts))
    few = [d for d in steps if total // d <= _MOST_UNITS and total // d > 1]
    return few[0] if few else steps[0] if total <= _TOO_MANY_UNITS else steps[-1]


def _chain(number: int) -> list[int]:
    """Divisors of a number that divide each other, descending.

    >>> _chain(12)
    [12, 6, 3, 1]
    """
    found = [number]
    while found[-1] > 1:
        found.append(max(d for d in divisors(found[-1]) if d < found[-1]))
    return found


def orders(num_groups: int) -> list[tuple[int, ...]]:
    """Orders in which groups of hosts are put one after another."""
    return list(permutations(range(num_groups)))[:_MOST_ORDERS]


def place(cluster: Cluster, sizes: Sequence[tuple[int, int]]) -> list[Submesh]:
    """Devices for every stage: in each group the largest first, so that parts of hosts fill whole ones.

    Args:
        cluster: The machines.
        sizes: For each stage its group of hosts and how many devices it has.
    """
    first_host, places = 0, {}
    for number, group in enumerate(cluster.groups):
        here = [i for i, (group_number, _) in enumerate(sizes) if group_number == number]
        at, per_host = 0, group.devices_per_host
        for i in sorted(here, key=lambda i: -sizes[i][1]):
            devices = sizes[i][1]
            hosts, each = max(devices // per_host, 1), min(devices, per_host)
            places[i] = Submesh(first_host + at // per_host, hosts, at % per_host, each, group.chip.name)
            at += devices
        first_host += group.num_hosts
    return [places[i] for i in range(len(sizes))]


def neighbours(places: Sequence[Submesh]) -> NDArray[np.bool_]:
    """For each stage, whether the one it sends to, of the last stage the first, is on the same host."""
    hosts = np.array([place.first_host if place.num_hosts == 1 else -1 - i for i, place in enumerate(places)])
    return hosts == np.roll(hosts, -1)
