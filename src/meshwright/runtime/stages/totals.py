"""Totals over all microbatches: what they start with, how one is added, and how replicas' totals are joined."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
    "prod": lax.mul,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}
_REDUCE: dict[str, Callable[..., Any]] = {
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "prod": lax.reduce_prod,
    "and": lax.reduce_and,
    "or": lax.reduce_or,
}


def over_replicas(kind: str, totals: Any) -> Any:
    """The total of all replicas, whose own totals are stacked along the first dim."""
    return totals.sum(0, dtype=totals.dtype) if kind == "sum" else _REDUCE[kind](totals, (0,))


def start(kind: str, dtype: Any) -> Any:
    """What a total starts with, so that it changes nothing."""
    if kind in ("sum", "or"):
        return False if dtype == jnp.bool_ else 0
    if kind == "prod":
        return 1
    if kind == "and":
        return True if dtype == jnp.bool_ else -1
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf if kind == "max" else jnp.inf
    if dtype == jnp.bool_:
        return kind == "min"
    return jnp.iinfo(dtype).min if kind == "max" else jnp.iinfo(dtype).max
