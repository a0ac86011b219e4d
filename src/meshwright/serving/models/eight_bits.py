"""Keys and values in 8 bits: half the cache of 16, or a quarter of 32, at the price of some exactness.

Each vector of a head has a scale of its own, by which its largest number becomes the largest of the type: keys of one
token may be a hundred times those of another, and a scale for all would leave most of them a few steps. Of two equal
neighbours in size, `int8` has steps of 1/127 of the largest number, `float8` of 1/16 of each number: `int8` is nearer.
All attention looks at what is kept, within a chunk as well, so that a text is the same however its prompt is cut.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshwright.zoo.layers import Array

#: The largest number of each type, and what NumPy calls it.
_TYPES = {"int8": (127.0, "int8"), "float8": (448.0, "float8_e4m3fn")}
EIGHT_BITS = tuple(_TYPES)


def kept_types(dtype: str, shape: Sequence[int]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The types of what is kept of keys and of values, (..., head_dim): they themselves, and their scales in 8 bits."""
    if dtype not in _TYPES:
        return (jax.ShapeDtypeStruct(tuple(shape), dtype),) * 2
    small = jax.ShapeDtypeStruct(tuple(shape), _TYPES[dtype][1])
    scale = jax.ShapeDtypeStruct(tuple(shape[:-1]), "float32")
    return small, small, scale, scale


def kept(dtype: str, new: Sequence[Array]) -> Sequence[Array]:
    """Keys and values as they are kept; what is no pair of 8 bits stays as it is."""
    if dtype not in _TYPES:
        return new
    (k, of_keys), (v, of_values) = (_small(dtype, one) for one in new)
    return k, v, of_keys, of_values


def recovered(arrays: Sequence[Array], dtype: DTypeLike) -> tuple[Array, Array]:
    """The reverse: keys and values of what is kept, as near as it is."""
    if len(arrays) == 2:
        return arrays[0], arrays[1]
    k, v = (
        (one.astype(jnp.float32) * scale[..., None]).astype(dtype)
        for one, scale in zip(arrays[:2], arrays[2:], strict=True)
    )
    return k, v


def _small(dtype: str, values: Array) -> tuple[Array, Array]:
    most, stored = _TYPES[dtype]
    values = values.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(values), axis=-1), jnp.finfo(jnp.float32).tiny * most) / most
    scaled = jnp.clip(values / scale[..., None], -most, most)  # beyond the largest, where rounding leads, is no number
    return (jnp.round(scaled) if dtype == "int8" else scaled).astype(stored), scale
