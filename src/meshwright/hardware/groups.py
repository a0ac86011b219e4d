"""Finds the links that a collective along some mesh axes crosses: inside one host, between hosts, or both.

Devices are numbered host-major and meshes are row-major, so the stride and size of an axis decide which wires it uses.
A "domain" is the set of devices that the fast link joins: a host, or a whole TPU slice.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from meshwright.hardware.link import Link
from meshwright.hardware.torus import place_axes, torus_inner

if TYPE_CHECKING:
    import numpy as np


class Machines(Protocol):
    """The part of a `Cluster` that this module reads; `Cluster` itself imports this module."""

    @property
    def num_devices(self) -> int: ...

    @property
    def devices_per_host(self) -> int: ...

    @property
    def torus_sizes(self) -> tuple[int, ...]: ...

    @property
    def intra(self) -> Link: ...

    @property
    def inter(self) -> Link: ...

    def torus(self, domain: int) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Inner:
    """The part of a group inside one domain.

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


def domain_size(cluster: Machines) -> int:
    """Number of devices that the fast link joins: a host's, or more where the link leaves the host."""
    per_host, total = cluster.devices_per_host, cluster.num_devices
    if cluster.torus_sizes:
        return math.prod(cluster.torus_sizes)
    reach = cluster.intra.domain
    sizes = (s for s in range(min(reach, total), per_host, -1) if total % s == 0 and s % per_host == 0)
    return next(sizes, per_host)


@lru_cache(maxsize=8192)
def group_of(cluster: Machines, sizes: tuple[int, ...], axes: tuple[int, ...]) -> Group:
    """Describes the groups that collectives along some axes of a mesh form, by the worst-placed one."""
    import numpy as np  # here and below, so that a plan is read and printed without it

    domain = domain_size(cluster)
    members_gn = _members(sizes, axes)
    starts_gn = _first_in_domain(members_gn // domain)
    spans_g = starts_gn.sum(axis=1)
    num_domains, size = int(spans_g.max()), members_gn.shape[1]
    inner = _inner(cluster, sizes, axes, members_gn, domain, math.ceil(size / num_domains))
    leaving = (members_gn // domain)[starts_gn & (spans_g > 1)[:, None]]  # one entry per group and domain it leaves
    nic = cluster.inter.bandwidth
    outer = nic * domain / int(np.bincount(leaving).max()) if leaving.size else nic
    return Group(size, num_domains, inner, outer, min(nic, outer))


def _members(sizes: tuple[int, ...], axes: tuple[int, ...]) -> "np.ndarray":
    """Device numbers of every group, one ascending row per group."""
    import numpy as np

    devices = np.arange(math.prod(sizes)).reshape(sizes)
    others = [i for i in range(len(sizes)) if i not in axes]
    ordered = devices.transpose([*others, *sorted(axes)])
    return ordered.reshape(-1, math.prod(sizes[i] for i in axes))


def _first_in_domain(domains_gn: "np.ndarray") -> "np.ndarray":
    """Marks the first member that each group has in each domain; rows ascend."""
    import numpy as np

    starts_gn = np.ones(domains_gn.shape, dtype=bool)
    starts_gn[:, 1:] = np.diff(domains_gn, axis=1) > 0
    return starts_gn


def _inner(
    cluster: Machines,
    sizes: tuple[int, ...],
    axes: tuple[int, ...],
    members_gn: "np.ndarray",
    domain: int,
    size: int,
) -> Inner:
    link = cluster.intra
    if link.topology == "torus":
        runs = place_axes(cluster.torus(domain), link, sizes, domain)
        return Inner(size, *torus_inner(link, runs, axes))
    parts = _parts(members_gn, domain) if link.topology == "graph" else {tuple(range(size))}
    parts = {part for part in parts if len(part) > 1}
    rate = min((link.group_bandwidth(part, domain) for part in parts), default=link.bandwidth)
    pair = min((link.pair_bandwidth(part, domain) for part in parts), default=link.bandwidth)
    return Inner(size, rate, rate, pair, size - 1)


def _parts(members_gn: "np.ndarray", domain: int) -> set[tuple[int, ...]]:
    """The sets of devices, numbered inside their domain, that groups have there."""
    import numpy as np

    first_g = members_gn[:, :1] // domain * domain
    parts = set()
    for row in np.unique(members_gn - first_g, axis=0):  # groups with the same places in their domains count once
        hosts = row // domain
        for index in np.unique(hosts):
            parts.add(tuple((row[hosts == index] % domain).tolist()))
    return parts
