"""Arrays that only some processes have, such as those of a pipeline's stages, as Orbax takes them to be saved.

Orbax writes arrays of which every process has a part.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding

from meshwright.runtime.cpu_turns import in_turn
from meshwright.runtime.stages.cutting.layer_stack import spread_sharding
from meshwright.runtime.transfer.reshard import reshard


def of_some_processes(arrays: Sequence[Any]) -> list[bool]:
    """Which arrays only some processes have; all processes must ask together.

    An array that is on each process's own devices, the same in all of them, is none of these: the processes then name
    different devices.
    """
    local_counts = np.array([_first_and_count(array) for array in arrays], np.int32).reshape(-1, 2)
    partly = (local_counts[:, 1] > 0) & (local_counts[:, 1] < jax.process_count())
    if not partly.any():  # the processes agree on this: an array that all have is one of all in each of them
        return [False] * len(arrays)
    gathered_counts = gathered(local_counts)
    return (partly & (gathered_counts == gathered_counts[:1]).all(axis=(0, 2))).tolist()


def gathered(own: Any) -> np.ndarray:
    """An array of each process, stacked, in all of them; all must ask together."""
    gather = in_turn(process_allgather, jax.devices())
    return np.asarray(gather(own)).reshape(-1, *own.shape)


def _first_and_count(array: Any) -> tuple[int, int]:
    """The first process that has some of an array, and how many have."""
    if not isinstance(array, jax.Array):
        return -1, 0
    devices: set[Any] = array.sharding.device_set
    processes = {device.process_index for device in devices}
    return min(processes), len(processes)


class Views:
    """Arrays of some processes as arrays of all, of which the owners have the first copies and write them.

    Nothing is moved: the other devices hold zeros in place of further copies, the same ones for all arrays of a type.
    """

    def __init__(self) -> None:
        self._zeros: dict[Any, jax.Array] = {}

    def __call__(self, array: Any) -> jax.Array:
        """The view of one array; its further copies must not be read."""
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding) or jax.device_count() % sharding.mesh.size:
            return spread(array)
        mesh = sharding.mesh
        owners = list(mesh.devices.flat)
        others = [device for device in jax.devices() if device not in set(owners)]
        devices = np.array(owners + others).reshape(-1, *mesh.devices.shape)
        place = NamedSharding(Mesh(devices, ("copies", *mesh.axis_names)), sharding.spec)
        here = {shard.device: shard.data for shard in array.addressable_shards}
        part = place.shard_shape(array.shape)
        parts = [
            here[device] if device in here else self._zeros_on(device, part, array.dtype)
            for device in place.addressable_devices
        ]
        return jax.make_array_from_single_device_arrays(array.shape, place, parts, dtype=array.dtype)

    def _zeros_on(self, device: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        key = device, shape, dtype
        if key not in self._zeros:
            self._zeros[key] = jax.device_put(np.zeros(shape, dtype), device)
        return self._zeros[key]


def spread(array: Any) -> jax.Array:
    """An array of some processes, spread over all."""
    return reshard(array, spread_sharding(array.shape))


def all_have_one(shardings: Sequence[Any]) -> bool:
    """Whether each process has some of the devices of some sharding."""
    devices = (device for sharding in shardings for device in sharding.device_set)
    return len({device.process_index for device in devices}) == jax.process_count()


def is_everywhere(sharding: Any) -> bool:
    """Whether all processes have some of a sharding's devices."""
    return len({device.process_index for device in sharding.device_set}) == jax.process_count()
