"""Drawn steps that compute: element by element, in products and convolutions, over dims and windows."""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.generator.pool import Pool, for_products, for_sums
from tests.generator.values import BITS, FLOATS, INTEGERS, NUMBERS, ROUNDED, Value, exact_up_to, finite, tamed, whole

_SMALL = 1024  # elements: of more, XLA's CPU backend drops NaN in max and min on one device (docs/compiler-faults.md)


def elementwise(pool: Pool) -> Value:
    x = pool.exact(lambda v: v.dtype != "bool")
    if not x.is_float:
        y = pool.alike(x)
        ways = (jnp.add, jnp.multiply, jnp.subtract, jnp.bitwise_and, jnp.bitwise_xor, jnp.maximum, jnp.minimum)
        return x.made(pool.one_of(*ways)(x.array, y.array))
    how = pool.one_of("neg", "abs", "sign", "floor", "square", "clip", "where", "not a number")
    a = x.array
    if how == "square":
        small, limit, _ = for_products(x, 1)
        return small.made(small.array**2, limit, NUMBERS)
    made = {
        "neg": lambda: -a,
        "abs": lambda: jnp.abs(a),
        "sign": lambda: jnp.sign(a),
        "floor": lambda: jnp.floor(a),
        "clip": lambda: jnp.clip(a, -2, 3),
        "where": lambda: jnp.where(a > 0, a, -0.0).astype(a.dtype),
        "not a number": lambda: jnp.where(jnp.isnan(a), -0.0, a).astype(a.dtype),
    }[how]()
    return x.made(made, max(x.limit, 3), NUMBERS if how in ("clip", "sign") else BITS)


def combine(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.dtype != "bool")
    y = pool.alike(x)
    if not x.is_float:
        return x.made(x.array + y.array, trust=y.trust)
    if pool.chance(0.3) and x.is_exact and y.is_exact:
        how = pool.one_of(jnp.maximum, jnp.minimum)
        return x.made(how(x.array, y.array), max(x.limit, y.limit), max(y.trust, NUMBERS))._replace(finite=False)
    x, y = (tamed(v, exact_up_to(x.dtype) // 2) for v in (x, y))
    made = x.array - y.array if pool.chance(0.5) else x.array + y.array
    return x.made(made, x.limit + y.limit, max(y.trust, NUMBERS))._replace(finite=False)


def smooth(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.is_float and v.array.dtype.itemsize >= 2)
    how = pool.one_of(jnp.sin, jnp.tanh, jax.nn.sigmoid, lambda a: jax.nn.softmax(a, axis=-1), jax.nn.gelu)
    x = tamed(x, 64) if x.is_exact else x
    if not x.ndim:
        how = jnp.tanh
    return x.made(how(x.array), x.limit, ROUNDED)._replace(finite=False)


def normalise(pool: Pool) -> Value:
    x = tamed(pool.pick(lambda v: v.dtype == "float32" and v.ndim > 0 and v.array.size > 0), 64)
    dim, a = pool.dim(x), x.array
    if pool.chance(0.5):
        made = (a - a.mean(dim, keepdims=True)) / jnp.sqrt(a.var(dim, keepdims=True) + 1)
    else:
        made = a - jax.nn.logsumexp(a, axis=dim, keepdims=True)
    return x.made(made, x.limit, ROUNDED)._replace(finite=False)


def convert(pool: Pool) -> Value:
    x = pool.exact()
    dtype = pool.one_of(*FLOATS, *INTEGERS, "bool")
    if x.dtype == "bool":
        return Value(x.array.astype(dtype), 1, x.trust, True)
    if not x.is_float:
        if jnp.issubdtype(dtype, jnp.floating):  # what a float holds exactly, or sums of it would be rounded
            return Value((x.array & 3).astype(dtype), 3, NUMBERS, True)
        return x.made(x.array.astype(dtype))
    if jnp.issubdtype(dtype, jnp.floating):
        small = tamed(x, min(exact_up_to(dtype), 200))
        small = finite(small) if dtype == "float8_e4m3fn" else small
        return small.made(small.array.astype(dtype))
    return whole(x).made(whole(x).array.astype(dtype))


def compare(pool: Pool) -> Value:
    x = pool.exact()
    how = pool.one_of(jnp.less, jnp.equal, jnp.not_equal, jnp.greater_equal)
    return Value(how(x.array, pool.alike(x).array), 1, NUMBERS, True)


def product(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.ndim > 0 and v.dtype != "bool")
    fitting = [v for v in pool.values if v.ndim and v.shape[0] == x.shape[-1] and v.dtype == x.dtype]
    y = pool.one_of(*fitting) if fitting else None
    count = x.shape[-1]
    small, limit, exact = for_products(x, count)
    if y is None or x.ndim + y.ndim > 5:
        w = (jnp.arange(count * 8) % 3 - 1).reshape(count, 8).astype(x.array.dtype)
        return small.made(small.array @ w, limit, NUMBERS if exact else ROUNDED)._replace(finite=False)
    other, _, _ = for_products(y, count)
    trust = max(other.trust, NUMBERS if exact else ROUNDED)
    return small.made(jnp.tensordot(small.array, other.array, 1), limit, trust)._replace(finite=False)


def joined_products(pool: Pool) -> Value:
    """Sums that might be settled together, but for what lies between."""
    x = pool.exact(lambda v: v.ndim > 0 and v.dtype in ("float32", "uint8", "int8", "bfloat16"))
    small = finite(for_products(x, x.shape[-1])[0])
    a, b = ((jnp.arange(x.shape[-1] * 8) % n - 1).reshape(-1, 8).astype(x.array.dtype) for n in (3, 4))
    how = pool.one_of("int32", "float32", "half", "scaled")
    left, right = small.array @ a, small.array @ b
    if how == "half" and small.is_float:
        left, right = ((v.astype(jnp.float32) * 0.5).astype(jnp.int32) for v in (left, right))
        return Value(left + right, float("inf"), NUMBERS, True)
    if how == "scaled":
        left, right = (v * jnp.asarray(2, v.dtype) for v in (left, right))
    else:
        left, right = (v.astype("int32" if how == "half" else how) for v in (left, right))
    return Value(left + right, 4 * exact_up_to(x.dtype) if small.is_float else 2048, NUMBERS, True)


def batched_product(pool: Pool) -> Value:
    x = pool.pick(lambda v: v.ndim == 3 and v.dtype != "bool")
    small, limit, exact = for_products(x, x.shape[-1])
    made = jnp.einsum("bik,bjk->bij", small.array, small.array)
    return small.made(made, limit, NUMBERS if exact else ROUNDED)._replace(finite=False)


def reduce(pool: Pool) -> Value:
    x = pool.exact(lambda v: v.ndim > 0 and v.array.size > 0)
    dims = tuple({pool.dim(x) for _ in range(pool.one_of(1, 1, 2))})
    count = prod(x.shape[d] for d in dims)
    if x.dtype == "bool":
        return Value(pool.one_of(jnp.any, jnp.all)(x.array, axis=dims), 1, x.trust, True)
    if not x.is_float:
        if pool.chance(0.4):
            how = pool.one_of(lax.reduce_and, lax.reduce_or, lax.reduce_xor)
            return x.made(how(x.array, dims))
        return x.made(pool.one_of(jnp.sum, jnp.max, jnp.min, jnp.prod)(x.array, axis=dims).astype(x.array.dtype))
    how = pool.one_of("sum", "max", "min", "max", "min", "prod")
    if x.array.size > _SMALL:
        x = finite(x)
    if how == "sum":
        small, exact = for_sums(x, count)
        return small.made(small.array.sum(dims), small.limit * count, NUMBERS if exact else ROUNDED)._replace(
            finite=False
        )
    if how == "prod":
        small = tamed(x, 1)
        return small.made(small.array.prod(dims), 1, NUMBERS)._replace(finite=False)
    return x.made(getattr(jnp, how)(x.array, axis=dims), trust=NUMBERS)


def accumulate(pool: Pool) -> Value:
    x = pool.exact(lambda v: v.ndim > 0 and v.dtype != "bool" and v.array.size > 0)
    dim, reverse = pool.dim(x), pool.chance(0.3)
    how = pool.one_of(lax.cummax, lax.cummin, lax.cumsum)
    exact = True
    if how is lax.cumsum:
        x, exact = for_sums(x, x.shape[dim])
    made = how(x.array, axis=dim, reverse=reverse)
    return x.made(made, x.limit * x.shape[dim], NUMBERS if exact else ROUNDED)._replace(finite=False)


def window(pool: Pool) -> Value:
    """Two windows over one array, so that what one pads might reach the other."""
    x = finite(pool.exact(lambda v: v.ndim >= 2 and v.dtype == "float32" and v.array.size > 0))
    x = tamed(x, 1000)
    sizes = tuple(pool.one_of(1, 2, 3) if n > 3 else 1 for n in x.shape)
    strides = tuple(pool.one_of(1, 2) if n > 1 else 1 for n in sizes)
    padding = pool.one_of("SAME", "VALID")
    added = lax.reduce_window(x.array, 0.0, lax.add, sizes, strides, padding)
    most = lax.reduce_window(x.array, -jnp.inf, lax.max, sizes, strides, padding)
    limit = x.limit * prod(sizes)
    made = pool.one_of(added, most, added + most)
    return x.made(made, 2 * limit, NUMBERS)._replace(finite=False)


def convolve(pool: Pool) -> Value:
    x = finite(pool.exact(lambda v: v.ndim in (3, 4) and v.dtype == "float32" and v.array.size > 0))
    spatial = x.ndim - 2
    groups = pool.one_of(1, 1, 2) if x.shape[-1] % 2 == 0 else 1
    taps = tuple(pool.one_of(1, 2, 3) for _ in range(spatial))
    shape = (*taps, x.shape[-1] // groups, 4)
    small, limit, exact = for_products(x, prod(shape[:-1]))
    letters = "HW"[:spatial]
    image = jnp.broadcast_to(jnp.float32(2), x.shape) if pool.chance(0.15) else small.array
    made = lax.conv_general_dilated(
        image,
        (jnp.arange(prod(shape)) % 3 - 1.0).reshape(shape),
        tuple(pool.one_of(1, 2) for _ in range(spatial)),
        pool.one_of([(1, 1)] * spatial, [(1, 0)] * spatial, [(2, 1)] * spatial),
        lhs_dilation=tuple(pool.one_of(1, 1, 2) for _ in range(spatial)),
        rhs_dilation=tuple(pool.one_of(1, 1, 2) for _ in range(spatial)),
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        feature_group_count=groups,
    )
    return small.made(made, limit, NUMBERS if exact else ROUNDED)._replace(finite=True)


def chain(pool: Pool) -> Value:
    """A long chain on what costs nothing to make: a recurrence, or one operation after another."""
    x = pool.pick(lambda v: v.ndim > 0 and v.dtype == "float32")
    at: Any = (jnp.arange(x.shape[-1]) % 3 - 1).astype(jnp.float32)
    if pool.chance(0.5):
        before, now = jnp.ones_like(at), at
        for _ in range(24):
            before, now = now, jnp.clip(2 * at * now - before, -8, 8)
    else:
        now = at
        for i in range(120):
            now = jnp.abs(now - i % 3)
    small = tamed(x, 1000)
    return small.made(small.array + now, small.limit + 200, NUMBERS)


ARITHMETIC = (
    *(elementwise, combine, combine, smooth, normalise, convert, convert, compare, product, product, joined_products),
    *(batched_product, reduce, reduce, accumulate, window, convolve, chain),
)
