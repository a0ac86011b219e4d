"""Chooses the mesh views of a cluster that are worth solving."""

from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.hardware import Cluster, Mesh

# Views of three axes that are tried. With all of them 3 of 4 steps of the zoo on 32 to 256 GPUs are the same, and one,
# of 6 layers of Llama-3-70B on 256, is 0.4% quicker.
_MOST_FINE = 2
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


def worth_refining(fine: Sequence[Mesh], floors: Mapping[tuple[int, ...], float]) -> list[Mesh]:
    """Of views of three axes, those whose views of two neighbouring axes merged promise most, the best first.

    Args:
        fine: The views of three axes.
        floors: What views of fewer axes cost without a memory limit; one whose merged views are not known is tried.
    """
    merged = {mesh: ((a * b, c), (a, b * c)) for mesh in fine for a, b, c in [mesh.sizes]}
    known = [mesh for mesh in fine if all(sizes in floors for sizes in merged[mesh])]
    known.sort(key=lambda mesh: sum(floors[sizes] for sizes in merged[mesh]))
    return [mesh for mesh in fine if mesh not in known or mesh in known[:_MOST_FINE]]


def _spread(numbers: list[int]) -> list[int]:
    """All of the numbers, or an evenly spaced selection of many."""
    count = min(len(numbers), _MOST_OF_A_KIND)
    return [numbers[round(i)] for i in np.linspace(0, len(numbers) - 1, count)]
