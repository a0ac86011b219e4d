"""Chooses the mesh views of a cluster that are worth solving."""

import numpy as np

from meshwright.hardware import Cluster, Mesh

_MOST_OF_A_KIND = 5  # views that cut the hosts, or the devices of each host, in two
_LARGE_HOST = 8  # devices from which a host that is one of several is cut in two beside an axis over the hosts


def auto_meshes(cluster: Cluster) -> list[Mesh]:
    """Views whose axes follow the machines: each axis is within hosts or spans whole hosts.

    A view that does not (200 devices of 50 hosts × 4 as 40 × 5) sends every collective over the slow link without
    offering a split that an aligned view lacks. Of many views of one kind, an evenly spaced selection is taken.
    """
    hosts, devices = cluster.num_hosts, cluster.devices_per_host
    across = [d for d in range(2, hosts) if hosts % d == 0]
    inside = [d for d in range(2, devices) if devices % d == 0]
    shapes: list[tuple[int, ...]] = [(hosts * devices,), (hosts, devices)]
    shapes += [(hosts * devices // inner, inner) for inner in _spread(inside)]
    shapes += [(outer, hosts // outer * devices) for outer in _spread(across)]
    shapes += [(outer, hosts // outer, devices) for outer in _spread(across)]
    if devices >= _LARGE_HOST or hosts == 1:
        shapes += [(hosts, devices // inner, inner) for inner in _spread(inside)]
    squeezed = dict.fromkeys(tuple(n for n in shape if n > 1) or (1,) for shape in shapes)
    return [cluster.mesh(shape) for shape in sorted(squeezed, key=lambda s: (len(s), s))]


def _spread(numbers: list[int]) -> list[int]:
    """All of the numbers, or an evenly spaced selection of many."""
    count = min(len(numbers), _MOST_OF_A_KIND)
    return [numbers[round(i)] for i in np.linspace(0, len(numbers) - 1, count)]
