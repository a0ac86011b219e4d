"""What a device does in place of a collective: it makes a value of the same shape from its own shard alone.

Operands and results are materialised, as those of a collective are: XLA fuses nothing across them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def all_gather(value: Any, dim: int, count: int) -> jax.Array:
    """The own shard as often as there are devices, side by side along a dim."""
    return _apart(value, lambda x: repeated(x, dim, count))


def reduce_scatter(value: Any, dim: int, count: int) -> jax.Array:
    """The first of as many parts of a dim as there are devices."""
    return _apart(value, lambda x: first_part(x, dim, count))


def all_to_all(value: Any, source: int, target: int, count: int) -> jax.Array:
    """The parts of the target dim, side by side along the source dim."""

    def exchange(x: Any) -> jax.Array:
        parts = jnp.stack(jnp.split(x, count, axis=target), axis=source)  # the part's number is before the source dim
        shape = [size // count if d == target else size for d, size in enumerate(x.shape)]
        shape[source] *= count
        return parts.reshape(shape)

    return _apart(value, exchange)


def unchanged(value: Any) -> jax.Array:
    """An all-reduce or a permute: a value of the same shape, in the same memory."""
    return lax.optimization_barrier(value)


def repeated(value: Any, dim: int, count: int) -> jax.Array:
    """A value repeated along a dim."""
    wide = jnp.broadcast_to(jnp.expand_dims(value, dim), (*value.shape[:dim], count, *value.shape[dim:]))
    return wide.reshape(*value.shape[:dim], count * value.shape[dim], *value.shape[dim + 1 :])


def first_part(value: Any, dim: int, count: int) -> jax.Array:
    """The first of several parts of a dim."""
    return lax.slice_in_dim(value, 0, value.shape[dim] // count, axis=dim)


def _apart(value: Any, make: Callable[[Any], Any]) -> jax.Array:
    return lax.optimization_barrier(make(lax.optimization_barrier(value)))
