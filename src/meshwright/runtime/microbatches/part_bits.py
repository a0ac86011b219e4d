"""Random bits of one part of a batch: those that the whole batch would have drawn for its examples."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

_WORD = 2**32
Words = tuple[Any, Any]


def can_draw_parts(eqn: Any) -> bool:
    """Whether each bit that an equation draws depends on the key and on its own position alone."""
    return "fry" in str(eqn.invars[0].aval.dtype) and bool(jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]


def part_bits(keys: Any, bit_width: int, shape: Sequence[int], rows: Any, dim: int) -> jax.Array:
    """The bits that a draw of `shape` from each key has at some rows along one dim of that shape.

    Args:
        keys: Keys of the kind threefry2x32, which encrypts each element's position in the array.
        bit_width: The bits of an element.
        shape: What is drawn from each key, for the whole batch.
        rows: The positions along `dim`.
        dim: The dim of `shape`.
    """
    part = tuple(len(rows) if d == dim else n for d, n in enumerate(shape))
    words = jax.random.key_data(keys)
    drawn = (*keys.shape, *part)
    first, second = (
        jnp.broadcast_to(words[..., word].reshape(*keys.shape, *(1 for _ in part)), drawn) for word in (0, 1)
    )
    positions = (jnp.broadcast_to(word, drawn) for word in _positions(shape, part, rows, dim))
    high, low = threefry2x32_p.bind(first, second, *positions)
    dtype = jnp.dtype(f"uint{bit_width}")
    if bit_width == 64:
        return (high.astype(dtype) << 32) | low.astype(dtype)
    return (high ^ low).astype(dtype)


def _positions(shape: Sequence[int], part: Sequence[int], rows: Any, dim: int) -> Words:
    """The places of a part's elements in the whole array, in row-major order, as two words."""
    high = low = jnp.zeros(part, jnp.uint32)
    for d in range(len(shape)):
        along = lax.broadcasted_iota(jnp.uint32, part, d)
        if d == dim:
            along = jnp.broadcast_to(jnp.expand_dims(rows, [e for e in range(len(part)) if e != d]), part)
        more_high, more_low = _times(along, prod(shape[d + 1 :]))
        low = low + more_low
        high = high + more_high + (low < more_low).astype(jnp.uint32)
    return high, low


def _times(x: Any, factor: int) -> Words:
    """The product of 32-bit numbers and a number of up to 64 bits, as two words, by products of 16 bits."""
    top, factor = factor // _WORD, factor % _WORD
    (x1, x0), (f1, f0) = (x >> 16, x & 0xFFFF), (jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF))
    middle = x1 * f0 + ((x0 * f0) >> 16)
    other = x0 * f1 + (middle & 0xFFFF)
    high = x1 * f1 + (middle >> 16) + (other >> 16)
    return high + x * jnp.uint32(top), x * jnp.uint32(factor)
