"""Drawn steps that were each wrong, or ended the process, somewhere: Fourier transforms, convolutions with awkward
padding and their gradients, experts' products, narrow look-ups, arrays without elements, loops under `vmap`."""

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.generator.pool import Pool, for_products, for_sums
from tests.generator.values import NUMBERS, ROUNDED, Value, exact_up_to, finite, tamed


def spectrum(pool: Pool) -> Value:
    """A Fourier transform along any dim, or over two."""
    x = tamed(finite(pool.pick(lambda v: v.dtype == "float32" and v.ndim > 0 and v.array.size > 0)), 64)
    dim, how = pool.dim(x), pool.one_of("fft", "ifft", "rfft", "irfft", "rfft2")
    if how == "rfft2" and x.ndim > 1:
        dims = tuple(pool.rng.permutation(x.ndim)[:2].tolist())
        made = jnp.fft.rfft2(x.array, axes=dims)
    else:
        how = "rfft" if how == "rfft2" else how
        if how == "irfft" and x.shape[dim] < 2:
            how = "fft"
        made = getattr(jnp.fft, how)(x.array, axis=dim)
    made = made.real + made.imag if jnp.iscomplexobj(made) else made
    return x.made(made, 2 * x.limit * x.array.size, ROUNDED)


def _convolution(pool: Pool, x: Value) -> tuple[Any, tuple[int, ...]]:
    """A convolution of dilated, unevenly and negatively padded windows, and the shape of its kernel."""
    spatial = x.ndim - 2
    groups = pool.one_of(1, 1, 2) if x.shape[-1] % 2 == 0 else 1
    taps = tuple(pool.one_of(1, 2, 3) for _ in range(spatial))
    letters = "HW"[:spatial]
    convolve = partial(
        _cut_first if pool.cuts_first else lax.conv_general_dilated,
        window_strides=tuple(pool.one_of(1, 1, 2) for _ in range(spatial)),
        padding=[pool.one_of((1, 1), (-1, 2), (2, -1), (0, 3), (-1, 1)) for _ in range(spatial)],
        lhs_dilation=tuple(pool.one_of(1, 2, 3) for _ in range(spatial)),
        rhs_dilation=tuple(pool.one_of(1, 1, 2) for _ in range(spatial)),
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        feature_group_count=groups,
    )
    return convolve, (*taps, x.shape[-1] // groups, 4)


def _cut_first(image: Any, kernel: Any, *, padding: list[tuple[int, int]], **options: Any) -> Any:
    """A convolution whose negative padding is a slice of its image, wherever no dilation makes that another number."""
    cuts = [
        -low if low < 0 and dilation == 1 else 0
        for (low, _), dilation in zip(padding, options["lhs_dilation"], strict=True)
    ]
    rest = [(low + cut, high) for (low, high), cut in zip(padding, cuts, strict=True)]
    cut = lax.slice(image, (0, *cuts, 0), image.shape)
    return lax.conv_general_dilated(cut, kernel, padding=rest, **options)


def _ramp(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    return (jnp.arange(prod(shape)) % 3 - 1).reshape(shape).astype(dtype)


def dilated(pool: Pool) -> Value:
    x = finite(pool.exact(lambda v: v.ndim in (3, 4) and v.dtype == "float32" and v.array.size > 0))
    convolve, shape = _convolution(pool, x)
    small, limit, exact = for_products(x, prod(shape[:-1]))
    return small.made(convolve(small.array, _ramp(shape)), limit, NUMBERS if exact else ROUNDED)._replace(finite=True)


def convolution_gradient(pool: Pool) -> Value:
    """The gradient of a convolution by its image or its kernel, where what comes back is of whole numbers."""
    x = finite(pool.exact(lambda v: v.ndim in (3, 4) and v.dtype == "float32" and v.array.size > 0))
    convolve, shape = _convolution(pool, x)
    # The gradient by the kernel adds up over all examples and places.
    small, limit, exact = for_products(x, x.array.size)
    made, back = jax.vjp(convolve, small.array, _ramp(shape))
    by_image, by_kernel = back(_ramp(made.shape))
    if pool.chance(0.5):
        return small.made(by_image, prod(shape), NUMBERS)._replace(finite=True)
    return small.made(by_kernel, limit, NUMBERS if exact else ROUNDED)._replace(finite=True)


def shared_out(pool: Pool) -> Value:
    """A product of each group of rows with a matrix of its own; how many rows a group has is known when it runs."""
    x = pool.exact(lambda v: v.ndim == 2 and v.array.size > 0 and v.dtype in ("float32", "bfloat16"))
    count = pool.one_of(2, 3, 4)
    small, limit, exact = for_products(finite(x), x.shape[1])
    places = jnp.sort(jnp.abs(pool.positions_in(x.shape[0], x.shape[0])) % count)
    sizes = jnp.bincount(places, length=count).astype(jnp.int32)
    weights = _ramp((count, x.shape[1], 4), x.array.dtype)
    made = lax.ragged_dot(small.array, weights, sizes)
    return small.made(made, limit, NUMBERS if exact else ROUNDED)._replace(finite=False)


def wide_product(pool: Pool) -> Value:
    """A product of narrow numbers that is added up in wide ones."""
    narrow = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "int8", "uint8")
    x = finite(pool.exact(lambda v: v.ndim > 0 and v.dtype in narrow))
    small = tamed(x, 4)
    wide = jnp.float32 if x.is_float else jnp.int32
    weights = _ramp((x.shape[-1], 4), x.array.dtype)
    made = lax.dot_general(small.array, weights, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=wide)
    return Value(made, 512.0 * x.shape[-1], small.made(made, trust=NUMBERS).trust, True)


@jax.custom_vjp
def _marked(x: Any) -> Any:
    return x


# Whatever comes back, whole numbers by place go on: so gradients in narrow floats are exact, too.
_marked.defvjp(lambda x: (x, None), lambda _, g: (_ramp(g.shape, g.dtype),))


def narrow_look_up(pool: Pool) -> Value:
    """Rows of a table in half precision, or into one, and gradients that are added up in it."""
    x = tamed(finite(pool.exact(lambda v: v.dtype == "float32" and v.ndim > 0 and v.array.size > 0)), 64)
    dtype, dim = pool.one_of(jnp.bfloat16, jnp.float16), pool.dim(x)
    places = pool.positions_in(pool.one_of(4, 6, 8), x.shape[dim])
    taken = jnp.take(x.array.astype(dtype), places, axis=dim, mode=pool.one_of("clip", "wrap"))
    return x.made(_marked(taken).astype(jnp.float32), 64, NUMBERS)


def scattered_along(pool: Pool) -> Value:
    """Rows written or added along any dim, in any mode, of numbers of any width."""
    x = tamed(pool.exact(lambda v: v.ndim > 0 and v.array.size > 0 and v.dtype != "bool"), 1)
    dim = pool.dim(x)
    count = pool.one_of(*[n for n in (1, 2, 3, 4) if n <= x.shape[dim]])
    places = pool.positions_in(count, x.shape[dim])
    how, mode = pool.one_of("add", "max", "min", "subtract"), pool.one_of(None, "drop", "clip", "fill")
    if mode == "clip":
        how = "add"
    rows = lax.slice_in_dim(x.array, 0, count, axis=dim)
    made = getattr(x.array.at[(slice(None),) * dim + (places,)], how)(rows, mode=mode)
    return x.made(made, x.limit * (1 + count), NUMBERS)._replace(finite=False)


def in_order(pool: Pool) -> Value:
    """Several arrays sorted together, the places of the largest, and sums along a sorted dim."""
    x = finite(pool.exact(lambda v: v.ndim > 0 and v.array.size > 0 and v.dtype in ("float32", "int32", "int8")))
    dim, how = pool.dim(x), pool.one_of("two keys", "places", "descending", "product", "associative")
    if how == "places":
        return Value(lax.top_k(x.array, max(1, x.shape[-1] // 2))[1], 32, NUMBERS, True)
    if how == "descending":
        return Value(jnp.argsort(x.array, axis=dim, descending=True, stable=True), 32, NUMBERS, True)
    if how == "product":
        return x.made(lax.cumprod(tamed(x, 1).array, axis=dim), trust=NUMBERS)
    if how == "associative":
        small, exact = for_sums(x, x.shape[dim])
        made = lax.associative_scan(jnp.add, small.array, axis=dim, reverse=pool.chance(0.5))
        return small.made(made, small.limit * x.shape[dim], NUMBERS if exact else ROUNDED)
    keys = lax.broadcasted_iota(jnp.int32, x.shape, dim) % 3
    return x.made(lax.sort((keys, x.array, -keys), dimension=dim, num_keys=2)[1], trust=NUMBERS)


def emptied(pool: Pool) -> Value:
    """A part without elements is summed over all its dims but one, and joined to the whole."""
    x = tamed(pool.exact(lambda v: v.ndim > 1 and v.dtype != "bool"), 8)
    dim = pool.dim(x)
    part = lax.slice_in_dim(x.array, 0, 0, axis=dim)
    kept = pool.dim(x)
    rest = tuple(d for d in range(x.ndim) if d != kept)
    joined = jnp.concatenate([x.array, part * 2], axis=dim)
    added = part.astype(jnp.float32).sum(rest)
    return x.made(joined + added.sum().astype(x.array.dtype), x.limit, NUMBERS)


def until_each(pool: Pool) -> Value:
    """A loop for each row that ends when the row says so."""
    x = tamed(finite(pool.exact(lambda v: v.dtype == "float32" and v.ndim > 1 and v.array.size > 0)), 100)

    def grown(row: Any) -> Any:
        return lax.while_loop(lambda c: c.sum() < 50, lambda c: c + jnp.abs(c) + 1, row)

    return x.made(jnp.clip(jax.vmap(grown)(x.array), -100, 100), 100, NUMBERS)


def nested(pool: Pool) -> Value:
    """A loop over rows with a loop over each row's numbers inside."""
    x = finite(pool.exact(lambda v: v.ndim > 1 and v.dtype in ("float32", "int32") and v.array.size > 0))
    x, exact = for_sums(x, 4 * x.shape[1])

    def row_by_row(total: Any, row: Any) -> tuple[Any, Any]:
        inner, seen = lax.scan(lambda c, y: (jnp.maximum(c, y), c + y), jnp.zeros_like(row[0]), row)
        return jnp.maximum(total, inner), seen

    made = lax.scan(row_by_row, jnp.zeros_like(x.array[0, 0]), x.array)[1]
    return x.made(made, 2 * x.limit, NUMBERS if exact else ROUNDED)._replace(finite=False)


@jax.custom_vjp
def _quantised(x: Any, w: Any) -> Any:
    return _forward(x, w)[0]


def _forward(x: Any, w: Any) -> Any:
    x, w = x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn)
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32), (x, w)


def _backward(saved: Any, g: Any) -> Any:
    x, w = saved
    g, rows = _ramp(g.shape, jnp.float8_e5m2), tuple(range(x.ndim - 1))
    product = partial(lax.dot_general, preferred_element_type=jnp.float32)
    return product(g, w, (((g.ndim - 1,), (1,)), ((), ()))), product(x, g, ((rows, rows), ((), ())))


_quantised.defvjp(_forward, _backward)


def own_product(pool: Pool) -> Value:
    """A product in float8 with gradients of its own."""
    x = tamed(finite(pool.exact(lambda v: v.ndim > 0 and v.dtype == "float32")), exact_up_to("float8_e4m3fn"))
    made = _quantised(x.array, _ramp((x.shape[-1], 4)))
    return x.made(made, x.limit * x.shape[-1], NUMBERS)._replace(finite=True)


WITHOUT_DERIVATIVES = (until_each,)
TRANSFORMS = (
    *(spectrum, dilated, convolution_gradient, shared_out, wide_product, narrow_look_up, scattered_along, in_order),
    *(emptied, until_each, nested, own_product),
)
