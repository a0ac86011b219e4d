"""Prices collectives: for each kind and group, the ways to do it, each as a fixed time and a time per byte.

With B the bytes of the whole buffer (gathered result, unreduced buffer, whole tensor of an all-to-all), n devices of
which m share a domain, h = n / m domains, w bytes/s inside, o bytes/s that the group may send out of a domain, and
t = 0.78 · min(w, o):

    ring          gather, scatter: (n-1)/n · B / min(w, o)     all-reduce: twice that      n-1 or 2(n-1) hops
    tree          gather, scatter: (n-1)/n · B / t             all-reduce: 2 B / t         log2 h, 2 log2 h hops
    hierarchical  all-reduce only: scatter inside on B, reduce across on B / m, gather inside on B
    all-to-all    the slower of (m-1)/n² · B / w inside and (n-m)/n² · B / (o/m) across
    permute       B / the slowest wire between neighbours

NCCL gathers and scatters by rings alone, or by a tree where each domain has one device of the group.
`ring_ways`, `tree_ways`, `hierarchical_ways`, `exchange_ways` and `permute_ways` implement these lines; the time is the
least of them. Where a link was measured (`Link.timings`), the measurement is the only way. On an abstract mesh
(`abstract_ways`) every axis has one fixed cost and one cost per byte.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.hardware.groups import Group
from meshwright.hardware.link import Link, Protocol
from meshwright.units import Numeric

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")

#: One way to do a collective: seconds, and seconds per byte.
Way = tuple[float, float]

#: A tree keeps only part of its wires busy: NCCL's tuning tables give 18.8 GB/s where a ring's wires carry 24.
TREE_FRACTION = 0.78
#: Messages of an all-to-all go out one after another: time of each, from the same tables (16 to 256 ranks).
MESSAGE_S = 0.8e-6
#: Size, α and β of one axis.
Axis = tuple[int, float, float]


def ways(group: Group, intra: Link, inter: Link, kind: str) -> tuple[Way, ...]:
    """All ways worth having for a collective: fastest start first, each next one cheaper per byte."""
    if group.size == 1:
        return ((0.0, 0.0),)
    measured = (inter if group.num_domains > 1 else intra).measured(kind, group.size)
    if measured is not None:
        return (measured,)
    if kind == "all_to_all":
        return prune(exchange_ways(group, intra, inter))
    if kind == "permute":
        return prune(permute_ways(group, intra, inter))
    across = hierarchical_ways(group, intra, inter) if kind == "all_reduce" else []
    return prune([*_flat(group, intra, inter, kind), *across])


def least_s(ways: Sequence[Way], num_bytes: Numeric) -> Numeric:
    """Seconds of the fastest of some ways; a number or an array, like ``num_bytes``."""
    if isinstance(num_bytes, int | float):
        return min(alpha + beta * num_bytes for alpha, beta in ways) if num_bytes > 0 else 0.0
    import numpy as np  # here, so that a plan is read and printed without it

    sizes = np.asarray(num_bytes, dtype=float)
    times = ways[0][0] + ways[0][1] * sizes
    for alpha, beta in ways[1:]:
        times = np.minimum(times, alpha + beta * sizes)
    times = np.where(sizes > 0, times, 0.0)
    seconds: Any = float(times) if times.ndim == 0 else times  # NumPy's own numbers become Python's
    return seconds


def prune(found: Iterable[Way]) -> tuple[Way, ...]:
    """Keeps the ways that are the fastest for some size: the lower envelope of the lines α + β·B."""
    kept: list[Way] = []
    for way in sorted(found):
        if kept and way[1] >= kept[-1][1]:
            continue
        while len(kept) > 1 and _overtakes_at(kept[-2], way) <= _overtakes_at(kept[-2], kept[-1]):
            kept.pop()
        kept.append(way)
    return tuple(kept)


def _overtakes_at(first: Way, later: Way) -> float:
    """Bytes from which the later way, which is slower to start, is the faster one."""
    return (later[0] - first[0]) / (first[1] - later[1])


def ring_ways(group: Group, intra: Link, inter: Link, kind: str) -> list[Way]:
    """One ring through all devices; it enters and leaves each domain over all the wires the group has there."""
    return [_ring(group, intra, inter, kind, a, b) for a, b in _protocols(group, intra, inter, kind)]


def tree_ways(group: Group, intra: Link, inter: Link, kind: str) -> list[Way]:
    """A tree across domains (recursive halving and doubling for gather and scatter): fewer hops, fewer busy wires.

    Inside a domain NCCL's trees are chains, so they gain nothing there; and it gathers and scatters so (its "PAT") only
    where the group has one device in each domain.
    """
    if group.num_domains == 1 or (kind != "all_reduce" and group.inner.size > 1):
        return []
    return [_tree(group, intra, inter, kind, a, b) for a, b in _protocols(group, intra, inter, kind)]


def hierarchical_ways(group: Group, intra: Link, inter: Link) -> list[Way]:
    """An all-reduce inside each domain and across domains in turn, so that only 1/m of the buffer goes across."""
    if group.num_domains == 1 or group.inner.size == 1:
        return []
    inside, across = _split(group)
    best_inside = [_sum(way, 2) for way in _flat(inside, intra, inter, "reduce_scatter")]  # and gathered again
    best_across = [(alpha, beta / group.inner.size) for alpha, beta in _flat(across, intra, inter, "all_reduce")]
    return [(a + c, b + d) for a, b in best_inside for c, d in best_across]


def exchange_ways(group: Group, intra: Link, inter: Link) -> list[Way]:
    """Every device sends a part to every other one, inside and across at the same time."""
    n, m, h = group.size, group.inner.size, group.num_domains
    ways = []
    for near, far in _protocols(group, intra, inter, "all_to_all"):
        alpha, beta = _base_s(group, near, far) + near.hop_s * math.log2(n), 0.0
        if m > 1:
            rate = group.inner.exchange_bandwidth * near.efficiency * intra.exchange_efficiency
            beta = (m - 1) / n**2 / rate + _copy(intra, n) / n
        if h > 1:
            # Half of a small group's pairs meet on one wire: measured as 1 - 0.44/h of the network's rate.
            rate = group.outer_bandwidth / m * far.efficiency * (1 - 0.44 / h)
            alpha += far.hop_s + MESSAGE_S * (n - m)
            beta = max(beta, (n - m) / n**2 / rate)
        ways.append((alpha, beta))
    return ways


def permute_ways(group: Group, intra: Link, inter: Link) -> list[Way]:
    """Every device sends to the next one; the slowest wire on the way sets the pace."""
    ways = []
    for near, far in _protocols(group, intra, inter, "permute"):
        hop_s, rate = near.hop_s, group.inner.pair_bandwidth * near.efficiency
        if group.num_domains > 1:
            hop_s, rate = far.hop_s, group.device_bandwidth * far.efficiency
        ways.append((_base_s(group, near, far) + hop_s, 1 / rate))
    return ways


def _flat(group: Group, intra: Link, inter: Link, kind: str) -> list[Way]:
    return list(prune([*ring_ways(group, intra, inter, kind), *tree_ways(group, intra, inter, kind)]))


def _ring(group: Group, intra: Link, inter: Link, kind: str, near: Protocol, far: Protocol) -> Way:
    passes = 2 if kind == "all_reduce" else 1
    n = group.size
    hops_s = _hops_s(group, near, far, group.inner.num_steps * group.num_domains, group.num_domains - 1)
    beta = passes * (n - 1) / n / _rate(group, near, far) + _copy(intra, n)
    return _base_s(group, near, far) + passes * hops_s, beta


def _tree(group: Group, intra: Link, inter: Link, kind: str, near: Protocol, far: Protocol) -> Way:
    passes = 2 if kind == "all_reduce" else 1
    n = group.size
    hops_s = _hops_s(group, near, far, group.inner.num_steps, math.log2(group.num_domains))
    share = 1.0 if kind == "all_reduce" else (n - 1) / n
    beta = passes * share / (TREE_FRACTION * _rate(group, near, far)) + _copy(intra, n)
    return _base_s(group, near, far) + passes * hops_s, beta


def _base_s(group: Group, near: Protocol, far: Protocol) -> float:
    return max(near.base_s, far.base_s) if group.num_domains > 1 else near.base_s


def _hops_s(group: Group, near: Protocol, far: Protocol, num_inner: float, num_outer: float) -> float:
    inner_s = num_inner * near.hop_s if group.inner.size > 1 else 0.0
    return inner_s + num_outer * far.hop_s


def _rate(group: Group, near: Protocol, far: Protocol) -> float:
    inside = group.inner.bandwidth * near.efficiency if group.inner.size > 1 else math.inf
    outside = group.outer_bandwidth * far.efficiency if group.num_domains > 1 else math.inf
    return min(inside, outside)


def _copy(intra: Link, size: int) -> float:
    """Time per byte of the buffer that a device takes to copy its own n-th of it."""
    return 1 / (size * intra.copy_bandwidth) if intra.copy_bandwidth else 0.0


def _sum(way: Way, times: int) -> Way:
    return way[0] * times, way[1] * times


def _split(group: Group) -> tuple[Group, Group]:
    """The group's part inside one domain, and the devices of equal rank across domains."""
    inner = group.inner
    alone = type(inner)(1, inner.bandwidth, inner.exchange_bandwidth, inner.pair_bandwidth, 0)
    inside = Group(inner.size, 1, inner, group.outer_bandwidth, group.device_bandwidth)
    share = group.outer_bandwidth / inner.size
    return inside, Group(group.num_domains, group.num_domains, alone, share, share)


def _protocols(group: Group, intra: Link, inter: Link, kind: str) -> list[tuple[Protocol, Protocol]]:
    """Pairs of protocols to try, for the inner and the outer link."""
    near = _serving(intra, kind, max(group.inner.size, 2))
    far = _serving(inter, kind, max(group.num_domains, 2))
    if group.num_domains == 1:
        return [(p, far[0]) for p in near]
    if group.inner.size == 1:
        return [(near[0], p) for p in far]  # the device still starts the collective
    return [(a, b) for a in near for b in far]


def _serving(link: Link, kind: str, size: int) -> list[Protocol]:
    """The protocols that serve a collective; a link made for others serves it with its first one."""
    return [p for p in link.protocols if p.serves(kind, size)] or [link.protocols[0]]


def abstract_ways(kind: str, axes: list[Axis]) -> tuple[Way, ...]:
    """The cost of a collective along axes in sequence, as its single way.

    >>> abstract_ways("all_gather", [(4, 1.0, 1.0)])
    ((1.0, 0.75),)
    """
    alpha = beta = 0.0
    gathered = 1.0  # share of the buffer that an axis works on: what the later axes have not yet multiplied
    for size, axis_alpha, axis_beta in reversed(axes):
        share = gathered if kind in ("all_gather", "reduce_scatter") else 1.0
        alpha += axis_alpha
        beta += axis_beta * _wire_share(kind, size) * share
        gathered /= size
    return ((alpha, beta),)


def _wire_share(kind: str, size: int) -> float:
    """Part of the buffer that one device sends along an axis."""
    if kind == "permute":
        return 1.0
    if kind == "all_to_all":
        return (size - 1) / size**2
    return (2 if kind == "all_reduce" else 1) * (size - 1) / size
