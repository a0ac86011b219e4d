"""Describes the wires: a link's bandwidth, its shape, and the protocols a collective may run over it."""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, get_args

from meshwright.errors import ClusterError
from meshwright.schema import Amount, Count, Rate, Size

Topology = Literal["switch", "graph", "shared", "torus"]
TOPOLOGIES: tuple[str, ...] = get_args(Topology)


@dataclass(frozen=True)
class Protocol:
    """One way the communication library drives a link: cheap to start, or fast once it runs.

    Attributes:
        name: The library's name for it, e.g. ``"simple"``.
        base_s: Time to start a collective, whatever its size.
        hop_s: Time for one step to reach the next device.
        efficiency: Fraction of the link's bandwidth that it reaches.
        kinds: The collectives it serves; empty means all of them.
        min_size: The smallest group that it serves.
    """

    name: str
    base_s: Amount
    hop_s: Amount
    efficiency: Rate
    kinds: tuple[str, ...] = ()
    min_size: Size = 2

    def serves(self, kind: str, size: int) -> bool:
        return size >= self.min_size and (not self.kinds or kind in self.kinds)


@dataclass(frozen=True)
class Timing:
    """The measured time of a collective among groups of one size, all groups at once.

    Attributes:
        kind: The collective, e.g. ``"all_reduce"``.
        size: Number of devices in a group.
        alpha_s: Fixed time.
        beta_s: Time per byte; bytes are counted as `Mesh.collective_s` does.
    """

    kind: str
    size: Count
    alpha_s: Amount
    beta_s: Amount


@dataclass(frozen=True)
class Link:
    """The connection of devices, inside a host or between hosts.

    Attributes:
        kind: Name of the technology, e.g. ``"nvlink4"``.
        bandwidth: Bytes per second that one device sends, one way, with all its wires.
        topology: ``"switch"`` (everyone reaches everyone at full rate), ``"graph"`` (fixed wires between pairs),
            ``"shared"`` (all devices share one bus) or ``"torus"``.
        protocols: At least one.
        copy_bandwidth: Rate at which a device copies its own part of a collective; 0 where it costs nothing.
        shared_bandwidth: Bytes per second of the whole bus where it is shared, or what is left to devices that no wire
            joins in a graph.
        edges: Wires of a graph: ``(device, device, number of wires)``.
        torus_dims: Number of dims of a torus.
        wrap_multiple: A torus dim whose size is a multiple of this closes into a ring.
        domain: How many devices the link reaches; 0 means one host's.
        exchange_efficiency: Fraction of the collective rate that an all-to-all reaches.
        timings: Measured times of collectives over this link; where a kind has any, they are its price, and bandwidth,
            topology and protocols are not used.
    """

    kind: str
    bandwidth: Rate
    protocols: tuple[Protocol, ...]
    topology: Topology = "switch"
    copy_bandwidth: Amount = 0.0
    shared_bandwidth: Amount = 0.0
    edges: tuple[tuple[Size, Size, Size], ...] = ()
    torus_dims: Size = 0
    wrap_multiple: Size = 0
    domain: Size = 0
    exchange_efficiency: Rate = 1.0
    timings: tuple[Timing, ...] = ()

    def measured(self, kind: str, size: int) -> tuple[float, float] | None:
        """α and β of a collective among groups of a size, from measurements; None where there are none.

        Between two measured sizes both follow a power of the size, which holds for rings (constant), trees and threads
        that wait for each other (α grows) and all-to-alls (β falls) alike; beyond them the nearest one counts.
        """
        timings = sorted((t for t in self.timings if t.kind == kind), key=lambda t: t.size)
        if not timings:
            return None
        below = max((t for t in timings if t.size <= size), key=lambda t: t.size, default=timings[0])
        above = min((t for t in timings if t.size >= size), key=lambda t: t.size, default=timings[-1])
        if below.size >= above.size:
            return below.alpha_s, below.beta_s
        share = math.log(size / below.size) / math.log(above.size / below.size)
        alpha = below.alpha_s ** (1 - share) * above.alpha_s**share
        return alpha, below.beta_s ** (1 - share) * above.beta_s**share

    def group_bandwidth(self, members: tuple[int, ...], num_active: int) -> float:
        """Rate, one way per device, of a collective among some devices of a host.

        Args:
            members: The group's devices, numbered inside their host.
            num_active: How many devices of the host communicate at the same time.
        """
        share = min(self.bandwidth, self.shared_bandwidth / max(num_active, 1))
        if self.topology == "shared":
            return share
        if self.topology != "graph" or not self._knows(members):
            return self.bandwidth
        if not self._joined(members):
            return share
        # Every device sends and receives the same amount, so the one with the fewest wires sets the pace.
        fewest = min(sum(self._wires(device, other) for other in members) for device in members)
        return fewest * self._wire_bandwidth

    def pair_bandwidth(self, members: tuple[int, ...], num_active: int) -> float:
        """Rate, one way, when every device of a group sends to the next one only."""
        if self.topology != "graph" or not self._knows(members):
            return self.group_bandwidth(members, num_active)
        if not self._joined(members):
            return self.group_bandwidth(members, num_active)
        fewest = min(self._wires(a, b) for a, b in pairwise((*members, members[0])))
        return (fewest or 0.5) * self._wire_bandwidth  # neighbours without a wire take two hops of another one

    def _wires(self, device: int, other: int) -> int:
        return _wire_table(self.edges).get(device, {}).get(other, 0)

    @property
    def _wire_bandwidth(self) -> float:
        """Bytes per second of one wire of a graph: the device that has the most of them uses all its bandwidth."""
        return self.bandwidth / max(sum(wires.values()) for wires in _wire_table(self.edges).values())

    def _joined(self, members: tuple[int, ...]) -> bool:
        """Whether wires lead from any member to any other without leaving the group."""
        reached, frontier = {members[0]}, [members[0]]
        while frontier:
            device = frontier.pop()
            neighbours = [other for other in members if other not in reached and self._wires(device, other)]
            reached.update(neighbours)
            frontier += neighbours
        return len(reached) == len(members)

    def _knows(self, members: tuple[int, ...]) -> bool:
        """Whether the graph holds all members; a larger host (a DGX-2's 16 V100) is taken to have a switch."""
        return max(members) <= max(_wire_table(self.edges))


def complete(link: Link, where: str) -> Link:
    """Refuses a link without the figures that its collectives are priced by."""
    needed = {"shared": "shared_bandwidth", "graph": "edges", "torus": "torus_dims"}.get(link.topology)
    if needed and not getattr(link, needed):
        raise ClusterError(f"{where}: topology {link.topology!r} needs {needed!r}; add a line '{needed} = …'.")
    if not link.protocols:
        raise ClusterError(f"{where}: a link needs at least one of [[protocols]]; add one.")
    return link


@lru_cache(maxsize=64)
def _wire_table(edges: tuple[tuple[int, int, int], ...]) -> dict[int, dict[int, int]]:
    """Number of wires from each device to each other one."""
    table: dict[int, dict[int, int]] = {}
    for a, b, count in edges:
        for one, other in ((a, b), (b, a)):
            wires = table.setdefault(one, {})
            wires[other] = wires.get(other, 0) + count
    return table


@dataclass(frozen=True)
class Host:
    """The links of one machine: among its devices, and from each device out to other hosts."""

    num_devices: Count
    intra: Link
    inter: Link
