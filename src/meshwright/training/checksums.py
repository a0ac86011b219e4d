"""Checksums of arrays that do not depend on how an array is split, made where its parts lie.

Every word of an array is mixed with its position, and the mixed words are added up modulo 2³². A sum has no order, so
each device adds up its own part and only the sums meet: nothing is gathered, and a pass costs one reading of memory.
The mixing maps words one to one, so a change within one word always changes the sum; of other changes one in 2⁶⁴ is
missed, since there are two sums. This is against accidents, not against forgers.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.runtime.cpu_turns import in_turn

_WIDTHS = (2, 4, 8, 16, 32)  # bits of the types that have an unsigned one as wide
_SECOND = 0x9E3779B9  # makes the two sums differ; any number but 0 would


def checksums(arrays: Mapping[str, Any]) -> dict[str, str]:
    """The checksum of each array; with several processes all must ask, and all are told the same."""
    sums = jax.device_get({name: _run(_on_device(array)) for name, array in arrays.items()})
    return {name: "".join(f"{int(part):08x}" for part in parts) for name, parts in sums.items()}


def _on_device(array: Any) -> Any:
    """An array that is kept in the host's memory, in the device's: programs read no other."""
    if not isinstance(array, jax.Array):
        return array
    device: Any = next(iter(array.sharding.device_set))
    usual = device.default_memory().kind
    if array.sharding.memory_kind in (None, usual):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind(usual))


def _run(array: Any) -> tuple[jax.Array, jax.Array]:
    return in_turn(_sums, array.sharding.device_set)(array) if isinstance(array, jax.Array) else _sums(array)


@jax.jit
def _sums(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    parts = [array.real, array.imag] if jnp.iscomplexobj(array) else [array]
    first = second = jnp.uint32(0)
    for number, part in enumerate(parts):
        words = _words(part)
        place = _places(words.shape, number)
        first += jnp.sum(_mix(words ^ place), dtype=jnp.uint32)
        second += jnp.sum(_mix(words + _mix(place ^ np.uint32(_SECOND))), dtype=jnp.uint32)
    return first, second


def _words(array: jax.Array) -> jax.Array:
    """The bits of an array's numbers; those of 64 bits are two words each, along a dim of their own."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    bits = (jnp.finfo if jnp.issubdtype(array.dtype, jnp.floating) else jnp.iinfo)(array.dtype).bits
    if bits == 64:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    if bits not in _WIDTHS:  # float6: every number of it is one of float32
        array, bits = array.astype(jnp.float32), 32
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)


def _places(shape: tuple[int, ...], number: int) -> jax.Array:
    """A number for each position, as good as random; dim by dim, since there may be more positions than words."""
    found = jnp.full(shape, _mix(jnp.uint32(number)))
    for dim in range(len(shape)):
        found = _mix(found ^ jax.lax.broadcasted_iota(jnp.uint32, shape, dim))
    return found


def _mix(word: Any) -> Any:
    """MurmurHash3's finaliser: one to one on 32 bits, and every bit of the result hangs on every one of the word."""
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))
