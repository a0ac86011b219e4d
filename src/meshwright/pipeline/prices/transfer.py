"""The time of a transfer from one stage to another, between hosts or inside one."""

from functools import lru_cache

from meshwright.hardware import Cluster, Mesh


def transfer_s(cluster: Cluster, num_bytes: float, near: bool = False) -> float:
    """Seconds, one way, that each device of a stage takes to send some bytes to the next stage.

    Args:
        cluster: The machines.
        num_bytes: Bytes that a device sends.
        near: Whether both stages are on one host.
    """
    near = near or cluster.num_hosts == 1
    return max(float(mesh.collective_s("permute", (0,), float(num_bytes))) for mesh in _neighbours(cluster, near))


def exchange_s(cluster: Cluster, num_bytes: float) -> float:
    """Seconds that two stages which share a parameter take to sum its gradient and to return the parameter."""
    return 2 * transfer_s(cluster, num_bytes)


@lru_cache(maxsize=64)
def _neighbours(cluster: Cluster, near: bool) -> tuple[Mesh, ...]:
    """For each kind of host, a mesh of two such hosts, or of two devices of one host."""
    found = []
    for group in cluster.groups:
        if not near:
            found.append(group.part(2, group.devices_per_host).mesh((2, group.devices_per_host)))
        elif group.devices_per_host > 1:
            found.append(group.part(1, 2).mesh((2,)))
    return tuple(found) or (cluster.groups[0].part(1, 1).mesh((1,)),)
