"""What a stage sends to the next one, and the time that takes: between hosts, or inside one.

The runtime does the same (`runtime.transfer.routes`). Inside a host every device of the next stage reads what it needs
from a device that has it. Between hosts every byte crosses once: the devices of the next stage fetch different parts,
and gather the rest from each other over the links of their host.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from meshwright.arrays import Floats
from meshwright.cost.sustained import SHARED_ADAPTER, sustained_s
from meshwright.hardware import Cluster, Mesh
from meshwright.pipeline.prices.layer_prices import Item, LayerPrices

if TYPE_CHECKING:  # a loaded plan is simulated without JAX, which these need
    from meshwright.pipeline.layers.layers import Layers


def crossing_bytes(layers: "Layers", prices: LayerPrices, share: float) -> tuple[Floats, Floats]:
    """Bytes of the activations that cross the cut before each layer and after the last, for a device of the stage
    before the cut: those that it holds, and its equal share of all.

    Args:
        layers: The layers.
        prices: Their prices on the stage's view.
        share: The part of the whole batch's bytes that is a device's share.
    """
    equal = layers.crossing_bytes * share
    held = np.append(prices.items[Item.CROSSING_BYTES], 0.0)
    return np.where(equal > 0, np.maximum(held, equal), 0.0), equal


def send_s(cluster: Cluster, held: Floats, equal: Floats, near: bool, num_devices: int) -> Floats:
    """Seconds, one way, that each device of a stage takes to send activations to the next stage.

    Args:
        cluster: The machines.
        held, equal: For each cut, what a device holds of them, and its equal share of all.
        near: Whether both stages are on one host.
        num_devices: How many devices the stage has.
    """
    if near or cluster.num_hosts == 1:
        return np.where(equal > 0, _permute_s(cluster, held, True), 0.0)
    each = share_of_adapter(cluster, num_devices) * _permute_s(cluster, equal, False)
    found = np.where(equal > 0, each, 0.0)
    sharing = np.rint(np.divide(held, equal, out=np.ones_like(held), where=equal > 0))
    for count in set(sharing[sharing > 1].tolist()):
        found += np.where(sharing == count, _gather_s(cluster, held, int(count)), 0.0)
    return found


def transfer_s(cluster: Cluster, num_bytes: float, near: bool = False) -> float:
    """Seconds, one way, that a device takes to send some bytes to one of another stage, on the same host or not."""
    return float(_permute_s(cluster, np.array(num_bytes, float), near or cluster.num_hosts == 1))


def share_of_adapter(cluster: Cluster, num_devices: int) -> float:
    """Part of the time between hosts that a stage's devices take if they share an adapter with others, who wait."""
    if cluster.num_hosts == 1 or cluster.inter.kind != SHARED_ADAPTER:
        return 1.0
    return min(1.0, num_devices / cluster.devices_per_host)


def exchange_s(cluster: Cluster, num_bytes: float) -> float:
    """Seconds that two stages which share a parameter take to sum its gradient and to return the parameter."""
    return 2 * transfer_s(cluster, num_bytes)


def _permute_s(cluster: Cluster, num_bytes: Floats, near: bool) -> Floats:
    found: Floats = np.max(
        [sustained_s(mesh, "permute", (0,), num_bytes) for mesh in _neighbours(cluster, near)], axis=0
    )
    return found


def _gather_s(cluster: Cluster, num_bytes: Floats, count: int) -> Floats:
    """Seconds in which so many devices of a host gather some bytes of which each has a part."""
    found = np.zeros_like(num_bytes)
    for group in cluster.groups:
        if (sharing := min(count, group.devices_per_host)) > 1:
            mesh = group.part(1, sharing).mesh((sharing,))
            found = np.maximum(found, sustained_s(mesh, "all_gather", (0,), num_bytes))
    return found


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
