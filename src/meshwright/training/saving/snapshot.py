"""The state at the moment of a save: copies on the host that no later step changes, made while the caller goes on.

JAX orders a copy before every later program that takes over the memory of what is copied, so that donated arrays are
safe as soon as their copies are asked for. What all devices of a process have alike is copied from one of them.
"""

import os
from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

_GIB = 1 << 30
_PINNED_GIB = 64  # XLA's own default of the variable below


def snapshot(leaves: Sequence[Any]) -> list[Any] | None:
    """Copies of the arrays among some leaves; None where devices cannot write so much to the host by themselves."""
    thin = [_thinned(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    arrays = [leaf for leaf in thin if _is_copied(leaf)]
    places = [_place_on_host(array.sharding) for array in arrays]
    if None in places or sum(map(_pinned_bytes, arrays)) > _most_pinned_bytes():
        return None
    copies = iter(jax.device_put(arrays, places, may_alias=False))
    return [
        np.array(leaf) if isinstance(leaf, np.ndarray) else next(copies) if _is_copied(leaf) else leaf for leaf in thin
    ]


def _is_copied(leaf: Any) -> bool:
    # The others are of other processes. To ask for the shards would make an array of each.
    return isinstance(leaf, jax.Array) and bool(leaf.sharding.addressable_devices)


def _place_on_host(sharding: Sharding) -> Sharding | None:
    """The same devices with the memory of their host; None where they cannot write to it."""
    device: Any = next(iter(sharding.device_set))
    if device.platform == "cpu" or sharding.memory_kind not in (None, device.default_memory().kind):
        return sharding
    kinds = {memory.kind for memory in device.addressable_memories()}
    return sharding.with_memory_kind("pinned_host") if "pinned_host" in kinds else None


def _pinned_bytes(array: jax.Array) -> int:
    device: Any = next(iter(array.sharding.device_set))
    if device.platform == "cpu":
        return 0
    parts = len(array.sharding.addressable_devices)
    return parts * prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _most_pinned_bytes() -> int:
    """A half of what XLA lets a process pin: programs may keep values there as well."""
    return int(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", _PINNED_GIB)) * _GIB // 2


def _thinned(array: jax.Array) -> jax.Array:
    """An array without those of its copies that are in a process which has another one; nothing is moved."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        return array
    mesh, used = sharding.mesh, {axis for entry in sharding.spec for axis in _axes(entry)}
    places = [i for i, name in enumerate(mesh.axis_names) if name in used]
    rest = [i for i in range(mesh.devices.ndim) if i not in places]
    names = tuple(mesh.axis_names[i] for i in places)
    copies = mesh.devices.transpose(*rest, *places).reshape(-1, *(mesh.devices.shape[i] for i in places))
    needed, covered = [], set[int]()
    for i in range(len(copies)):
        processes = {device.process_index for device in copies[i : i + 1].flat}
        if not processes <= covered:
            needed.append(i)
            covered |= processes
    if len(needed) == len(copies) or len(covered) < jax.process_count():  # an array of some is shown as one of all
        return array
    place = NamedSharding(Mesh(copies[needed], ("copies", *names)), sharding.spec, memory_kind=sharding.memory_kind)
    here = {shard.device: shard.data for shard in array.addressable_shards}
    parts = [here[device] for device in place.addressable_devices]
    return jax.make_array_from_single_device_arrays(array.shape, place, parts, dtype=array.dtype)


def _axes(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)
