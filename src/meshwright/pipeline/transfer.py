"""Time of what one stage sends to another: over the wires between hosts, or inside the only one there is."""

from functools import lru_cache

from meshwright.hardware import Cluster, Mesh


def transfer_s(cluster: Cluster, num_bytes: float) -> float:
    """Seconds, one way, in which each device of a stage sends some bytes to the next stage."""
    return max(float(mesh.collective_s("permute", (0,), float(num_bytes))) for mesh in _neighbours(cluster))


def exchange_s(cluster: Cluster, num_bytes: float) -> float:
    """Seconds in which two stages that share a parameter add up its gradient and hand it back."""
    return 2 * transfer_s(cluster, num_bytes)


@lru_cache(maxsize=64)
def _neighbours(cluster: Cluster) -> tuple[Mesh, ...]:
    """For each kind of host two of them as a mesh; two devices where there is one host only."""
    found = []
    for group in cluster.groups:
        if cluster.num_hosts > 1:
            found.append(group.part(2, group.devices_per_host).mesh((2, group.devices_per_host)))
        elif group.devices_per_host > 1:
            found.append(group.part(1, 2).mesh((2,)))
    return tuple(found) or (cluster.mesh((1,)),)
