"""Arrays that only some processes have, such as those of a pipeline's stages, as Orbax takes them to be saved.

Orbax writes arrays of which every process has a part.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from meshwright.runtime.cpu_turns import in_turn
from meshwright.runtime.stages.cutting.layer_stack import LayerStack, spread_sharding
from meshwright.runtime.transfer.reshard import reshard

Owners = Sequence[Sequence[int]]  # of each array the first process that has some of it, and how many have
Agree = Callable[[Owners, Callable[[list[Owners]], list[bool]]], list[bool]]


def of_some_processes(arrays: Sequence[Any], agree: Agree | None = None) -> list[bool]:
    """Which arrays only some processes have; all processes must ask together.

    An array that is on each process's own devices, the same in all of them, is none of these: the processes then name
    different devices.

    Args:
        arrays: The arrays, in the same order in all processes.
        agree: Makes one value of the values of all processes; by a program on their devices by default.
    """
    owners = [_first_and_count(array) for array in arrays]
    partly = [0 < count < jax.process_count() for _, count in owners]
    if not any(partly):  # the processes agree on this: an array that all have is one of all in each of them
        return partly
    are_same = (agree or _agree)(owners, _are_same)
    return [some and same for some, same in zip(partly, are_same, strict=True)]


def _are_same(owners: Sequence[Owners]) -> list[bool]:
    return [all(tuple(other) == tuple(of[0]) for other in of) for of in zip(*owners, strict=True)]


def _agree(own: Owners, combine: Callable[[list[Owners]], list[bool]]) -> list[bool]:
    return combine(gathered(np.array(own, np.int32)).tolist())


def gathered(own: Any) -> np.ndarray:
    """An array of each process, stacked, in all of them; all must ask together."""
    gather = in_turn(process_allgather, jax.devices())
    return np.asarray(gather(own)).reshape(-1, *own.shape)


def _first_and_count(array: Any) -> tuple[int, int]:
    """The first process that has some of an array, and how many have."""
    if not isinstance(array, jax.Array):
        return -1, 0
    some = processes(array.sharding)
    return min(some), len(some)


def moved(leaves: Sequence[Any]) -> list[Any]:
    """Leaves of which those are moved between processes that Orbax could not write otherwise; all must ask together."""
    leaves = [leaf.array() if isinstance(leaf, LayerStack) else leaf for leaf in leaves]
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and not _has_view(leaf)]
    for i, some in zip(places, of_some_processes([leaves[i] for i in places]), strict=True):
        leaves[i] = spread(leaves[i]) if some else leaves[i]
    return leaves


def _has_view(array: jax.Array) -> bool:
    """Whether it is no array of some processes, or one that `Views` can show as one of all."""
    count = _first_and_count(array)[1]
    if count == jax.process_count() or isinstance(array.sharding, SingleDeviceSharding):
        return True
    return isinstance(array.sharding, NamedSharding) and jax.device_count() % array.sharding.mesh.size == 0


class Views:
    """Arrays of some processes as arrays of all, of which the owners have the first copies and write them.

    Nothing is moved: the other devices hold zeros in place of further copies, the same ones for all arrays of a type.
    """

    def __init__(self) -> None:
        self._zeros: dict[Any, jax.Array] = {}

    def __call__(self, array: Any) -> jax.Array:
        """The view of one array that `moved` has left; its further copies must not be read."""
        sharding = array.sharding
        mesh = sharding.mesh
        owners = list(mesh.devices.flat)
        others = [device for device in jax.devices() if device not in set(owners)]
        devices = np.array(owners + others).reshape(-1, *mesh.devices.shape)
        place = NamedSharding(
            Mesh(devices, ("copies", *mesh.axis_names)), sharding.spec, memory_kind=sharding.memory_kind
        )
        here = {shard.device: shard.data for shard in array.addressable_shards}
        part = place.shard_shape(array.shape)
        parts = [
            here[device] if device in here else self._zeros_on(device, part, array.dtype, sharding.memory_kind)
            for device in place.addressable_devices
        ]
        return jax.make_array_from_single_device_arrays(array.shape, place, parts, dtype=array.dtype)

    def _zeros_on(self, device: Any, shape: tuple[int, ...], dtype: Any, memory_kind: str | None) -> jax.Array:
        key = device, shape, dtype, memory_kind
        if key not in self._zeros:
            place = SingleDeviceSharding(device, memory_kind=memory_kind)
            self._zeros[key] = jax.device_put(np.zeros(shape, dtype), place)
        return self._zeros[key]


def spread(array: Any) -> jax.Array:
    """An array of some processes, spread over all."""
    return reshard(array, spread_sharding(array.shape))


def all_have_one(shardings: Sequence[Any]) -> bool:
    """Whether each process has some of the devices of some sharding."""
    return len(processes(*shardings)) == jax.process_count()


def processes(*shardings: Any) -> set[int]:
    """The processes that have some of the devices of some sharding."""
    return {device.process_index for sharding in shardings for device in sharding.device_set}
