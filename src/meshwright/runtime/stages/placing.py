"""Puts arguments where the stages read them, and takes results from there; each process has its own stages' arrays.

An array of a stage whose devices are all of other processes has no shards here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshwright import jax_compat
from meshwright.runtime.processes.sharing import put
from meshwright.runtime.transfer.reshard import reshard


def is_here(sharding: NamedSharding) -> bool:
    """Whether this process has some of a sharding's devices."""
    return any(device.process_index == jax.process_index() for device in sharding.mesh.devices.flat)


def from_host(value: Any, sharding: NamedSharding) -> jax.Array:
    """A value that every process with some of the devices has; the others need not ask."""
    if sharding.is_fully_addressable:
        return put([value], [sharding])[0]
    if jax_compat.is_key_dtype(jax.dtypes.result_type(value)):
        words = from_host(np.asarray(jax.random.key_data(value)), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def absent(kind: Any, sharding: NamedSharding) -> jax.Array:
    """An array that other processes have."""
    return jax.make_array_from_single_device_arrays(tuple(kind.shape), sharding, [], dtype=kind.dtype)


def placer(place: NamedSharding) -> Callable[[Any], Any]:
    """Puts an argument where a stage reads it."""

    def placed(x: Any) -> jax.Array:
        if getattr(x, "sharding", None) == place:
            return x
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return reshard(x, place)
        # On one of its own devices the array would share the caller's buffer, which is deleted when it is donated.
        return from_host(x.copy() if isinstance(x, jax.Array) else x, place)

    return placed


def number_placer(place: NamedSharding) -> Callable[[Any], Any]:
    """Puts a single number that all stages have where one of them reads it: its own copies, where it has some."""

    def placed(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and not jax_compat.is_key_dtype(x.dtype):
            held = {shard.device: shard.data for shard in x.addressable_shards}
            own = [held[device] for device in place.addressable_devices if device in held]
            if x.is_fully_replicated and len(own) == len(place.addressable_devices):
                return jax.make_array_from_single_device_arrays(x.shape, place, own, dtype=x.dtype)
        return from_host(x.addressable_shards[0].data if isinstance(x, jax.Array) else x, place)

    return placed


def batch_placer(place: NamedSharding, count: int) -> Callable[[Any], Any]:
    """Puts a batch, as a stack of microbatches, where a stage reads it; with several processes all of them must ask."""

    def placed(x: Any) -> jax.Array | None:
        x = x if hasattr(x, "reshape") else np.asarray(x)
        stack = x.reshape(count, x.shape[0] // count, *x.shape[1:])
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return reshard(stack, place)
        return from_host(stack, place) if is_here(place) else None

    return placed


def joined(copies: Sequence[Any], sharding: NamedSharding) -> jax.Array:
    """One array of the copies of a single number that stages have; stages may share devices."""
    if jax_compat.is_key_dtype(copies[0].dtype):
        words = joined([jax.random.key_data(copy) for copy in copies], sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(copies[0]))
    shards = {shard.device: shard.data for copy in copies for shard in copy.addressable_shards}
    return jax.make_array_from_single_device_arrays(
        copies[0].shape, sharding, list(shards.values()), dtype=copies[0].dtype
    )
