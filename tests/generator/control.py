"""Drawn steps with programs inside: loops, branches, checkpoints, functions with derivatives of their own."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.generator.pool import Pool, for_products, for_sums
from tests.generator.values import NUMBERS, ROUNDED, Value, finite, tamed


def stacked(pool: Pool) -> Value:
    """A loop over rows that carries their largest and hands out what it carried."""
    x = pool.exact(lambda v: v.ndim > 1 and v.shape[0] > 0 and v.is_float)
    made = lax.scan(lambda c, y: (jnp.maximum(c, y), c - y), jnp.zeros_like(x.array[0]), x.array)[1]
    return x.made(made, 2 * x.limit, NUMBERS)._replace(finite=False)


def added_up(pool: Pool) -> Value:
    """A loop that adds up products, as they are or through what is not linear."""
    x = pool.exact(lambda v: v.ndim == 3 and v.dtype in ("float32", "int8", "uint8") and v.array.size > 0)
    x = finite(for_products(x, 64 * x.shape[1])[0])
    x = tamed(x, 8)
    dtype = pool.one_of("int32", "float32", x.dtype)
    zero = jnp.zeros((x.shape[2], x.shape[2]), dtype)
    made = lax.scan(lambda c, y: (c + (y.T @ y).astype(dtype), None), zero, x.array)[0]
    return Value(made, 64.0 * x.shape[0] * x.shape[1], NUMBERS, True)


def recurrent(pool: Pool) -> Value:
    """A recurrent network over vectors, without a batch."""
    x = pool.pick(lambda v: v.ndim == 2 and v.dtype == "float32")
    x = tamed(x, 8) if x.is_exact else x
    w = (jnp.arange(x.shape[1] ** 2) % 5 - 2.0).reshape(x.shape[1], x.shape[1]) / (4 * x.shape[1])

    def step(carry: Any, row: Any) -> tuple[Any, Any]:
        new = jnp.tanh(carry @ w + row)
        return new, new.sum()

    return x.made(lax.scan(step, jnp.zeros(x.shape[1]), x.array)[1], 64, ROUNDED)._replace(finite=False)


def counted(pool: Pool) -> Value:
    """A loop whose length is known only when it runs, and that reads rows by their number."""
    x = pool.exact(lambda v: v.ndim > 1 and v.shape[0] > 1 and v.dtype in ("float32", "int32"))
    x = tamed(x, 1000)

    def step(i: Any, total: Any) -> Any:
        return total + x.array[i]

    made = lax.fori_loop(0, jnp.clip(pool.position(), 0, 5), step, jnp.zeros_like(x.array[0]))
    return x.made(made, 5 * x.limit, NUMBERS)._replace(finite=False)


def until(pool: Pool) -> Value:
    x = pool.exact(lambda v: v.dtype == "float32" and v.ndim > 0 and v.array.size > 0)
    x = tamed(finite(x), 100)
    made = lax.while_loop(lambda c: c.sum() < 50, lambda c: c + jnp.abs(c) + 1, x.array)
    return x.made(jnp.clip(made, -100, 100), 100, NUMBERS)


def until_each(pool: Pool) -> Value:
    """A loop for each row, which ends when that row is large enough."""
    x = pool.exact(lambda v: v.dtype == "float32" and v.ndim > 1 and v.array.size > 0)
    x = tamed(finite(x), 100)
    grow = jax.vmap(lambda row: lax.while_loop(lambda c: c.sum() < 50, lambda c: c + jnp.abs(c) + 1, row))
    return x.made(jnp.clip(grow(x.array), -100, 100), 100, NUMBERS)


def branch(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.ndim > 0 and v.is_float)
    ways = [lambda a: a, lambda a: -a, lambda a: jnp.flip(a, 0), lambda a: a[::-1][::-1]]
    made = lax.switch(pool.position(), ways, x.array)
    return x.made(made)


def again(pool: Pool) -> Value:
    """A checkpoint around a product."""
    x = pool.pick(lambda v: v.ndim > 1 and v.dtype == "float32")
    small, _, exact = for_products(x, x.shape[-1])

    @jax.checkpoint
    def layer(a: Any) -> Any:
        w = (jnp.arange(a.shape[-1] * 4) % 3 - 1.0).reshape(-1, 4)
        return jnp.clip(a @ w, -50, 50) @ w.T

    return small.made(layer(small.array), 50 * 4, NUMBERS if exact else ROUNDED)._replace(finite=False)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled(factor: int, x: Any) -> Any:
    return x * factor


_scaled.defvjp(lambda factor, x: (x * factor, None), lambda factor, _, g: (g * factor,))


@jax.custom_jvp
def _bent(x: Any) -> Any:
    return jnp.where(x > 0, x, 0 * x)


_bent.defjvp(lambda primals, tangents: (_bent(primals[0]), jnp.where(primals[0] > 0, tangents[0], 0)))


def own_derivative(pool: Pool) -> Value:
    x = tamed(pool.exact(lambda v: v.dtype == "float32"), 1000)
    made = _bent(x.array) if pool.chance(0.5) else _scaled(3, x.array)
    return x.made(made, 3 * x.limit, NUMBERS)._replace(finite=False)


def mapped(pool: Pool) -> Value:
    x = pool.exact(lambda v: v.ndim > 1 and v.is_float and v.shape[0] > 0)
    x, exact = for_sums(x, x.shape[1])
    made = lax.map(lambda row: jnp.cumsum(row, axis=0), x.array)
    return x.made(made, x.limit * x.shape[1], NUMBERS if exact else ROUNDED)._replace(finite=False)


WITHOUT_DERIVATIVE = (counted, until, until_each)  # loops whose length is not known beforehand
CONTROL = (stacked, added_up, recurrent, counted, until, until_each, branch, again, own_derivative, mapped)
