"""Bit-exact conversions between floats and integers, for comparisons and for sums with zeros across devices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_INTEGERS = {8: jnp.int8, 16: jnp.int16, 32: jnp.int32, 64: jnp.int64}


class Words(NamedTuple):
    """How floats of one type are sent as integers.

    Attributes:
        pack: Makes integers of the floats.
        unpack: The inverse.
        extra: How many dims the integers have beyond those of the floats.
    """

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    extra: int = 0


def ordered(x: Any, largest: bool) -> jax.Array:
    """Integers in the order of floats; −0 precedes +0, and NaN is at the end that is sought, so that NaN wins.

    Args:
        x: Floats of 16 bits or more.
        largest: Whether the largest is sought; else the least.
    """
    key = _flipped(_bits(x))
    return jnp.where(jnp.isnan(x), _nan(key.dtype, largest), key)


def from_ordered(key: Any, dtype: Any, largest: bool) -> jax.Array:
    """The inverse of `ordered`."""
    nan = jnp.asarray(jnp.nan, dtype)
    return jnp.where(key == _nan(key.dtype, largest), nan, lax.bitcast_convert_type(_flipped(key), dtype))


def words_of(dtype: Any, *, in_pairs: bool = False) -> Words:
    """How to send floats of a dtype as integers with the same number of bytes.

    Args:
        dtype: Real or complex floats.
        in_pairs: Whether to put two floats of 16 bits into one integer, along a last dim of even size: collective
            libraries support no integers of 16 bits, and XLA would send them as 32.
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real = jnp.finfo(dtype).dtype
        return Words(
            lambda x: _bits(jnp.stack([jnp.real(x), jnp.imag(x)], -1)),
            lambda words: lax.complex(*(lax.bitcast_convert_type(words[..., i], real) for i in (0, 1))),
            extra=1,
        )
    if in_pairs:
        return Words(
            lambda x: lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), jnp.int32),
            lambda words: lax.bitcast_convert_type(words, dtype).reshape(*words.shape[:-1], 2 * words.shape[-1]),
        )
    return Words(_bits, lambda words: lax.bitcast_convert_type(words, dtype))


def _bits(x: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, _INTEGERS[8 * x.dtype.itemsize])


def _flipped(bits: Any) -> jax.Array:
    """Reverses the order of negative floats, whose magnitude grows with their bits; it is its own inverse."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _nan(integers: Any, largest: bool) -> jax.Array:
    return jnp.asarray(jnp.iinfo(integers).max if largest else jnp.iinfo(integers).min, integers)
