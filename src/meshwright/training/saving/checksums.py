"""Checksums of arrays that do not depend on how an array is split.

Every word of an array is mixed with its position, and the mixed words are added up modulo 2³². Addition commutes, so
parts are added up wherever they are and only the sums are sent: nothing is gathered, and memory is read once. Devices
add up what was restored; the host, which has a copy, adds up what is saved, beside the steps that follow. The mixing
maps words one to one, so a change within one word always changes the sum; of other changes one in 2⁶⁴ is missed, since
there are two sums. The checksums protect against accidents, not against forgery.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.runtime.cpu_turns import in_turn
from meshwright.training.saving.spread import all_have_one, gathered, processes

_WIDTHS = (2, 4, 8, 16, 32)  # bit widths for which there is an unsigned type
_SECOND = 0x9E3779B9  # makes the two sums differ; any number but 0 does


def checksums(arrays: Mapping[str, Any]) -> dict[str, str]:
    """The checksum of each array; with several processes all must call this, and all get the same result."""
    sums = jax.device_get({name: _run(_on_device(array)) for name, array in arrays.items() if _is_here(array)})
    if not all(map(_is_everywhere, arrays.values())):
        sums = _shared(list(arrays), sums)
    return {name: _written(sums[name]) for name in arrays}


def local_sums(arrays: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """The sums over the parts of arrays that this process has the first copies of, computed on the host."""
    return {
        name: _total([_on_host(part, begin) for part, begin in _first_copies(array)]) for name, array in arrays.items()
    }


def joined(sums: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The checksum of each array, from the local sums of all processes."""
    return {name: _written(_total([own[name] for own in sums])) for name in sums[0]}


def _written(sums: Sequence[int]) -> str:
    return "".join(f"{int(part):08x}" for part in sums)


def _total(sums: Sequence[Sequence[int]]) -> tuple[int, int]:
    return sum(first for first, _ in sums) % 2**32, sum(second for _, second in sums) % 2**32


def _first_copies(array: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """The parts of an array that this process writes, and the position of each in the whole array."""
    if isinstance(array, jax.Array):
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                yield shard.data, np.array([cut.start or 0 for cut in shard.index], np.uint32)
    elif jax.process_index() == 0:
        yield array, _zeros(array)


def _zeros(array: Any) -> np.ndarray:
    return np.zeros(array.ndim, np.uint32)


def _on_host(part: Any, begin: np.ndarray) -> tuple[int, int]:
    """The sums of a part, on the host where JAX has been left its backend for that."""
    with suppress(RuntimeError):
        part = jax.device_put(np.asarray(part), jax.local_devices(backend="cpu")[0])
    first, second = jax.device_get(_sums(_on_device(part), begin))
    return int(first), int(second)


def _is_here(array: Any) -> bool:
    return not isinstance(array, jax.Array) or jax.process_index() in processes(array.sharding)


def _is_everywhere(array: Any) -> bool:
    return not isinstance(array, jax.Array) or all_have_one([array.sharding])


def _shared(names: list[str], sums: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """The sums of all arrays, each from a process that has some of it."""
    local_sums = np.array([(1, *sums[name]) if name in sums else (0, 0, 0) for name in names], np.uint32)
    gathered_sums = gathered(local_sums)
    first = gathered_sums[:, :, 0].argmax(axis=0)
    return {name: tuple(gathered_sums[first[i], i, 1:].tolist()) for i, name in enumerate(names)}


def _on_device(array: Any) -> jax.Array:
    """An array, moved from the host's memory to the device's where needed: programs read only the latter."""
    if not isinstance(array, jax.Array):
        return array
    device: Any = next(iter(array.sharding.device_set))
    usual = device.default_memory().kind
    if array.sharding.memory_kind in (None, usual):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind(usual))


def _run(array: Any) -> tuple[jax.Array, jax.Array]:
    run = in_turn(_sums, array.sharding.device_set) if isinstance(array, jax.Array) else _sums
    return run(array, _zeros(array))


@jax.jit
def _sums(array: jax.Array, begin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of an array, or of a part that begins at some position of it."""
    parts = [array.real, array.imag] if jnp.iscomplexobj(array) else [array]
    first = second = jnp.uint32(0)
    for number, part in enumerate(parts):
        words = _words(part)
        place = _places(words.shape, number, begin)
        first += jnp.sum(_mix(words ^ place), dtype=jnp.uint32)
        second += jnp.sum(_mix(words + _mix(place ^ np.uint32(_SECOND))), dtype=jnp.uint32)
    return first, second


def _words(array: jax.Array) -> jax.Array:
    """The bits of an array's elements; an element of 64 bits is two words, along an additional dim."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    bits = (jnp.finfo if jnp.issubdtype(array.dtype, jnp.floating) else jnp.iinfo)(array.dtype).bits
    if bits == 64:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    if bits not in _WIDTHS:  # float6: float32 represents each of its numbers
        array, bits = array.astype(jnp.float32), 32
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)


def _places(shape: tuple[int, ...], number: int, begin: jax.Array) -> jax.Array:
    """A pseudo-random number for each position; dim by dim, since there may be more than 2³² positions."""
    numbers = jnp.full(shape, _mix(jnp.uint32(number)))
    for dim in range(len(shape)):
        position = jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        numbers = _mix(numbers ^ (position + begin[dim] if dim < begin.size else position))
    return numbers


def _mix(word: Any) -> jax.Array:
    """MurmurHash3's finaliser: one to one on 32 bits, and every bit of the result depends on every bit of the word."""
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))
