"""Chooses the mesh views of a cluster that are worth solving."""

from meshwright.hardware import Cluster, Mesh

MAX_SHAPES = 40


def auto_meshes(cluster: Cluster) -> list[Mesh]:
    """Views whose axes follow the machines: each axis lies within hosts or runs over whole hosts.

    A view that cuts across (200 devices of 50 hosts × 4 as 40 × 5) sends every collective over the slow link without
    offering a split that an aligned one lacks. Views with small inner axes come first: they are the ones that win.
    """
    hosts, devices = cluster.num_hosts, cluster.devices_per_host
    shapes: dict[tuple[int, ...], None] = {(cluster.num_devices,): None}
    for inner in _divisors(devices):
        shapes[hosts * devices // inner, inner] = None
    for outer in _divisors(hosts):
        shapes[outer, hosts // outer * devices] = None
        shapes[outer, hosts // outer, devices] = None
    for inner in _divisors(devices):
        shapes[hosts, devices // inner, inner] = None
    legal = dict.fromkeys(_squeeze(shape) for shape in shapes)
    ranked = sorted(legal, key=lambda s: (len(s), min(s) if len(s) > 1 else 0, s))
    return [cluster.mesh(shape) for shape in _spread(ranked)]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n > 1) or (1,)


def _spread(shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """At most `MAX_SHAPES`, always with the flat view, evenly taken from the rest."""
    if len(shapes) <= MAX_SHAPES:
        return shapes
    step = (len(shapes) - 1) / (MAX_SHAPES - 1)
    return [shapes[round(i * step)] for i in range(MAX_SHAPES)]
