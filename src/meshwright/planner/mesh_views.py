"""Chooses the mesh views of a cluster that are worth solving."""

from meshwright.hardware import Cluster, Mesh

_MOST_ACROSS = 5  # views of one kind that cut the hosts in two
_MOST_INSIDE = 2  # views that cut the devices of a host in two
_LARGE_HOST = 8


def auto_meshes(cluster: Cluster) -> list[Mesh]:
    """Views whose axes follow the machines: each axis is within hosts or spans whole hosts.

    A view that does not (200 devices of 50 hosts × 4 as 40 × 5) sends every collective over the slow link without
    offering a split that an aligned view lacks. Of many views of one kind, an evenly spaced selection is taken.
    """
    hosts, devices = cluster.num_hosts, cluster.devices_per_host
    across = [d for d in range(2, hosts) if hosts % d == 0]
    inside = [d for d in range(2, devices) if devices % d == 0]
    shapes: list[tuple[int, ...]] = [(hosts * devices,), (hosts, devices)]
    shapes += [(hosts * devices // inner, inner) for inner in _spread(inside, _MOST_INSIDE)]
    shapes += [(outer, hosts // outer * devices) for outer in _spread(across, _MOST_ACROSS)]
    shapes += [(outer, hosts // outer, devices) for outer in _spread(across, _MOST_ACROSS)]
    if devices >= _LARGE_HOST or hosts == 1:
        shapes += [(hosts, devices // inner, inner) for inner in _spread(inside, _MOST_INSIDE)]
    squeezed = dict.fromkeys(tuple(n for n in shape if n > 1) or (1,) for shape in shapes)
    return [cluster.mesh(shape) for shape in sorted(squeezed, key=lambda s: (len(s), s))]


def _spread(numbers: list[int], most: int) -> list[int]:
    if len(numbers) <= most:
        return numbers
    step = (len(numbers) - 1) / (most - 1)
    return [numbers[round(i * step)] for i in range(most)]
