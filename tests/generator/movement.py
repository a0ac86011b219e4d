"""Drawn steps that move numbers: indexing at awkward positions, sorting, layout."""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tests.generator.pool import Pool
from tests.generator.values import NUMBERS, ROUNDED, Value, finite, tamed


def look_up(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.ndim > 0 and v.array.size > 0)
    dim = pool.dim(x)
    places = pool.positions_in(pool.one_of(1, 4, 6, 8), x.shape[dim])
    mode = pool.one_of("clip", "wrap", "fill", None)
    if mode == "fill":
        fill = 0 if not x.is_float else pool.one_of(0, jnp.nan if "e4m3fn" not in x.dtype else 0)
        made = jnp.take(x.array, places, axis=dim, mode="fill", fill_value=fill)
    else:
        made = (
            x.array.at[(slice(None),) * dim + (places,)].get()
            if mode is None
            else jnp.take(x.array, places, axis=dim, mode=mode)
        )
    return x.made(made)._replace(finite=not x.is_float)


def one_row(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.ndim > 1 and v.shape[0] > 0)
    return x.made(x.array[pool.position()])


def cut_out(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.ndim > 0 and v.array.size > 0)
    sizes = [max(1, n // pool.one_of(1, 2)) for n in x.shape]
    return x.made(lax.dynamic_slice(x.array, [pool.position() for _ in sizes], sizes))


def put_in(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.ndim > 0 and v.array.size > 0)
    sizes = [max(1, n // pool.one_of(1, 2, 4)) for n in x.shape]
    # A part of x itself might be written over before it is read: see docs/compiler-faults.md.
    part = (jnp.arange(prod(sizes)) % 4 - 1).astype(x.array.dtype).reshape(sizes)
    part = -part if x.is_float else part
    return x.made(lax.dynamic_update_slice(x.array, part, [pool.position() for _ in x.shape]))


def scatter(pool: Pool) -> Value:
    x = pool.exact(lambda v: v.ndim > 0 and v.shape[0] > 1 and v.array.size > 0 and v.dtype != "bool")
    x = tamed(x, 1)
    count = max(1, x.shape[0] // 2)
    places = pool.positions_in(count, x.shape[0])
    # Multiplying floats has a derivative only where no position comes twice; and which of two rows is set is open.
    how = pool.one_of("set", "add", "add", "max", "min", "add" if x.is_float else "multiply")
    if how == "set":
        places = jnp.where(jnp.arange(count) == 0, pool.positions[-1], places)
    rows = x.array[:count]
    mode = pool.one_of(None, "drop", "clip") if how == "add" else pool.one_of(None, "drop")
    made = getattr(x.array.at[places], how)(rows, mode=mode)
    return x.made(made, x.limit * (1 + count), NUMBERS if how != "set" else 0)._replace(finite=False)


def along(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.ndim > 0 and v.array.size > 0)
    dim = pool.dim(x)
    places = lax.broadcasted_iota(jnp.int32, x.shape, dim) + pool.position()
    return x.made(jnp.take_along_axis(x.array, places, axis=dim, mode=pool.one_of("clip", "fill")))._replace(
        finite=False
    )


def segments(pool: Pool) -> Value:
    x = tamed(pool.exact(lambda v: v.ndim > 0 and v.shape[0] > 0 and v.dtype in ("float32", "int32")), 1000)
    to = pool.positions_in(x.shape[0], 6)
    made = jax.ops.segment_sum(x.array, to, 6)
    return x.made(made, x.limit * x.shape[0], NUMBERS)._replace(finite=False)


def order(pool: Pool) -> Value:
    x = pool.exact(lambda v: v.ndim > 0 and v.array.size > 0 and v.dtype != "bool")
    dim, how = pool.dim(x), pool.one_of("sort", "argsort", "argmax", "argmin", "top_k")
    if how == "sort":
        return x.made(jnp.sort(x.array, axis=dim), trust=NUMBERS)
    if how == "top_k" and x.dtype in ("float32", "int32"):
        return finite(x).made(lax.top_k(finite(x).array, max(1, x.shape[-1] // 2))[0], trust=NUMBERS)
    if how == "argsort" or how == "top_k":
        return Value(jnp.argsort(x.array, axis=dim), 32, NUMBERS, True)
    return Value(getattr(jnp, how)(x.array, axis=dim), 32, NUMBERS, True)


def turn(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.ndim > 1)
    return x.made(jnp.transpose(x.array, pool.rng.permutation(x.ndim).tolist()))


def reshape(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.ndim > 0)
    if x.ndim > 1 and pool.chance(0.6):
        dim = int(pool.rng.integers(x.ndim - 1))
        return x.made(x.array.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]))
    dim = pool.dim(x)
    parts = pool.one_of(*[n for n in (1, 2, 3, 4) if x.shape[dim] % n == 0])
    if x.ndim > 3:
        return x.made(x.array.reshape(-1))
    return x.made(x.array.reshape(*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :]))


def layout(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.ndim > 0)
    dim, a = pool.dim(x), x.array
    how = pool.one_of("reverse", "roll", "pad", "stretch", "join", "stride", "repeat", "lower half")
    if how == "reverse":
        return x.made(jnp.flip(a, dim))
    if how == "roll":
        return x.made(jnp.roll(a, pool.one_of(1, -3), dim))
    if how == "join":
        return x.made(jnp.concatenate([a, jnp.flip(a, dim)], dim))
    if how == "stride":
        return x.made(lax.slice_in_dim(a, 0, None, 2, dim))
    if how == "repeat":
        return x.made(jnp.repeat(a, 2, dim))
    if how == "lower half" and x.ndim > 1 and x.dtype != "bool":
        return x.made(jnp.tril(a), trust=NUMBERS)
    low, high, inner = pool.one_of((1, 2, 0), (-1, 2, 0), (2, -1, 1))
    config = [(low, high, inner) if d == dim and n > 2 else (0, 0, 0) for d, n in enumerate(x.shape)]
    return x.made(lax.pad(a, jnp.zeros((), a.dtype), config))


def draw_bits(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.ndim > 0 and v.dtype == "float32")
    key = jax.random.fold_in(pool.key, int(pool.rng.integers(100)))
    how = pool.one_of("mask", "whole", "normal")
    if how == "mask":
        return x.made(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x.array, 0), trust=NUMBERS)
    if how == "whole":
        drawn = jax.random.randint(key, x.shape, -4, 5).astype(jnp.float32)
        return tamed(x, 1000).made(tamed(x, 1000).array + drawn, 1004, NUMBERS)
    return x.made(x.array + jax.random.normal(key, x.shape), x.limit + 8, ROUNDED)


def spread(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.ndim < 3)
    return x.made(jnp.broadcast_to(x.array[..., None], (*x.shape, pool.one_of(4, 6))))


def blocks(pool: Pool) -> Value:
    """A Pallas kernel that moves blocks of a dim: each to its own place, or each to the place of another."""
    x = pool.pick(lambda v: v.ndim > 0 and v.array.size > 0 and v.dtype in ("float32", "bfloat16", "int32"))
    dim = pool.dim(x)
    size = pool.one_of(*[n for n in (1, 2, 3, 4) if x.shape[dim] % n == 0])
    count, shape = x.shape[dim] // size, tuple(size if d == dim else n for d, n in enumerate(x.shape))

    def selected(turn: bool) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda i: tuple((count - 1 - i if turn else i) if d == dim else 0 for d in axes))

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...]

    axes, made = range(x.ndim), jax.ShapeDtypeStruct(x.shape, x.array.dtype)
    specs = {"in_specs": [selected(False)], "out_specs": selected(pool.chance(0.3))}
    return x.made(pl.pallas_call(kernel, made, grid=(count,), interpret=True, **specs)(x.array))


MOVEMENT = (
    *(look_up, look_up, one_row, cut_out, cut_out, put_in, put_in, scatter, scatter, along, segments, order, order),
    *(turn, reshape, reshape, layout, layout, draw_bits, spread),
)
