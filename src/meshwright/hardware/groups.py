"""Finds what a collective along some mesh axes really crosses: devices of one host, several hosts, or both.

Devices are numbered host-major and meshes are row-major, so the stride and size of an axis decide which wires it uses.
A "domain" is the set of devices that the fast link joins: a host, or a whole TPU slice.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshwright.hardware.torus import place_axes, torus_inner

if TYPE_CHECKING:
    from meshwright.hardware.clusters import Cluster


@dataclass(frozen=True)
class Inner:
    """The part of a group that lies inside one domain.

    Attributes:
        size: Number of devices.
        bandwidth: Bytes per second, one way per device, of ring-like collectives.
        exchange_bandwidth: The same for an all-to-all.
        pair_bandwidth: The same when each device sends to the next one only.
        num_steps: Hops of the longest way a ring-like collective goes.
    """

    size: int
    bandwidth: float
    exchange_bandwidth: float
    pair_bandwidth: float
    num_steps: int


@dataclass(frozen=True)
class Group:
    """The devices that take part in one collective.

    Attributes:
        size: Number of devices.
        num_domains: Number of domains that they span, at worst.
        inner: Their part inside one domain.
        outer_bandwidth: Bytes per second, one way, that the group may send out of one domain while all the other
            groups do the same.
        device_bandwidth: The share of one device in that.
    """

    size: int
    num_domains: int
    inner: Inner
    outer_bandwidth: float
    device_bandwidth: float


def domain_size(cluster: "Cluster") -> int:
    """Number of devices that the fast link joins: a host's, or more where the link leaves the host."""
    per_host, total = cluster.devices_per_host, cluster.num_devices
    reach = cluster.intra.domain
    sizes = (s for s in range(min(reach, total), per_host, -1) if total % s == 0 and s % per_host == 0)
    return next(sizes, per_host)


def group_of(cluster: "Cluster", sizes: tuple[int, ...], axes: tuple[int, ...]) -> Group:
    """Describes the groups that collectives along some axes of a mesh form, by the worst-placed one."""
    domain = domain_size(cluster)
    members_gn = _members(sizes, axes)
    domains_gn = members_gn // domain
    num_domains = max(len(np.unique(row)) for row in domains_gn)
    size = members_gn.shape[1]
    inner = _inner(cluster, sizes, axes, members_gn, domain, math.ceil(size / num_domains))
    crossing = _most_crossing(domains_gn)
    nic = cluster.inter.bandwidth
    outer = nic * domain / crossing if crossing else nic
    return Group(size, num_domains, inner, outer, min(nic, outer))


def _members(sizes: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """Device numbers of every group, one row per group."""
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    others = [i for i in range(len(sizes)) if i not in axes]
    ordered = devices.transpose([*others, *sorted(axes)])
    return ordered.reshape(-1, math.prod(sizes[i] for i in axes))


def _most_crossing(domains_gn: np.ndarray) -> int:
    """The most groups that leave one domain at the same time."""
    counts: dict[int, int] = {}
    for row in domains_gn:
        touched = np.unique(row)
        for index in touched if len(touched) > 1 else ():
            counts[int(index)] = counts.get(int(index), 0) + 1
    return max(counts.values(), default=0)


def _inner(
    cluster: "Cluster",
    sizes: tuple[int, ...],
    axes: tuple[int, ...],
    members_gn: np.ndarray,
    domain: int,
    size: int,
) -> Inner:
    link = cluster.intra
    if link.topology == "torus":
        rate, exchange, pair, steps = torus_inner(link, place_axes(cluster.torus(domain), link, sizes, domain), axes)
        return Inner(size, rate, exchange, pair, steps)
    parts = {
        tuple(int(d) % domain for d in row[row // domain == index])
        for row in members_gn
        for index in set(row // domain)
    }
    parts = {part for part in parts if len(part) > 1}
    rate = min((link.group_bandwidth(part, domain) for part in parts), default=link.bandwidth)
    pair = min((link.pair_bandwidth(part, domain) for part in parts), default=link.bandwidth)
    return Inner(size, rate, rate, pair, max(size - 1, 0))
