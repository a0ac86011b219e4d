"""What the rules offer: the contract test proves them sound, this one that they do not give splits away."""

from collections.abc import Callable
from functools import partial
from string import ascii_lowercase
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Shape
from jax import lax

from meshwright.rules import LoopNest, loop_nest

from .contract import equations, signature_of


def nest_of(primitive: str, function: Callable, *args: Any) -> LoopNest:
    """The loop nest of the first operation of that primitive in a function."""
    traced = jax.make_jaxpr(function)(*args)
    return loop_nest(next(signature_of(eqn) for eqn in equations(traced.jaxpr) if eqn.primitive.name == primitive))


def text(nest: LoopNest) -> str:
    """The nest as an einsum: ``.`` cannot be split, ``k:sum`` is reducing, ``h~2`` has a halo of two elements."""
    names: dict[int, str] = {}
    for at in (i for dims in (*nest.operands, *nest.results) for dim in dims for i in dim):
        if nest.loops[at].kind != "unsplittable":
            names.setdefault(at, ascii_lowercase[len(names)])
    labels = [names.get(i, ".") for i in range(len(nest.loops))]
    for i, loop in enumerate(nest.loops):
        labels[i] += f":{loop.kind}" if loop.kind not in ("parallel", "unsplittable") else ""
        labels[i] += f"~{loop.halo}" if loop.halo else ""

    def tensor(dims: tuple[tuple[int, ...], ...]) -> str:
        return " ".join(labels[d[0]] if len(d) == 1 else f"({' '.join(labels[i] for i in d)})" for d in dims)

    return f"{', '.join(map(tensor, nest.operands))} -> {', '.join(map(tensor, nest.results))}"


def floats(*shape: int) -> Shape:
    return Shape(shape, jnp.float32)


def ints(*shape: int) -> Shape:
    return Shape(shape, jnp.int32)


def convolve(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    return lax.conv_general_dilated(x, w, **({"window_strides": (1,), "padding": "SAME"} | options))


def kernel_gradient(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.grad(lambda w: convolve(x, w, window_strides=(2,)).sum())(w)


TABLE: list[tuple[str, str, Callable, list[Shape]]] = [
    ("dot_general", "a b c:sum, c:sum d -> a b d", jnp.dot, [floats(2, 3, 4), floats(4, 5)]),
    (
        "ragged_dot_general",
        "a b:sum, c:sum b:sum d, . -> a d",
        lax.ragged_dot,
        [floats(8, 4), floats(3, 4, 5), ints(3)],
    ),
    ("conv_general_dilated", "a b:sum c~2, d b:sum . -> a d c~2", convolve, [floats(2, 3, 8), floats(4, 3, 3)]),
    (
        "conv_general_dilated",
        "a b:sum (c~5 .), d b:sum . -> a d c~5",
        partial(convolve, window_strides=(2,)),
        [floats(2, 3, 32), floats(4, 3, 7)],
    ),
    ("reduce_sum", "a b:sum c -> a c", lambda x: x.sum(1), [floats(2, 3, 4)]),
    ("argmax", "a . -> a", lambda x: x.argmax(1), [floats(2, 3)]),
    ("cumsum", "a . -> a .", partial(lax.cumsum, axis=1), [floats(2, 3)]),
    ("sort", "a . -> a .", jnp.sort, [floats(2, 3)]),
    ("top_k", "a . -> a ., a .", lambda x: lax.top_k(x, 2), [floats(2, 3)]),
    ("reshape", "a (b c) -> a b c", lambda x: x.reshape(2, 4, 3), [floats(2, 12)]),
    ("reshape", "a b c -> (a b) c", lambda x: x.reshape(6, 4), [floats(2, 3, 4)]),
    ("reshape", "(a .) . -> (a .) .", lambda x: x.reshape(4, 6), [floats(6, 4)]),
    ("broadcast_in_dim", "a -> b a", lambda x: jnp.broadcast_to(x, (3, 4)), [floats(4)]),
    ("concatenate", "a ., a . -> a .", lambda x, y: jnp.concatenate([x, y], 1), [floats(2, 3), floats(2, 4)]),
    ("slice", "a . -> a .", lambda x: x[:, :2], [floats(2, 3)]),
    ("gather", "a:sum b, c d . -> c d b", lambda t, i: t[i], [floats(6, 4), ints(2, 3)]),
    (
        "gather",
        "a b c:sum, a b d . -> a b d",
        lambda x, i: jnp.take_along_axis(x, i[..., None], 2)[..., 0],
        [floats(2, 3, 6), ints(2, 3)],
    ),
    (
        "scatter-add",
        "a b, c:sum ., c:sum b -> a b",
        lambda t, i, u: t.at[i].add(u),
        [floats(6, 4), ints(5), floats(5, 4)],
    ),
    ("random_bits", " -> a b", lambda: jax.random.bits(jax.random.key(0), (3, 4)), []),
    ("cholesky", "a . . -> a . .", lax.linalg.cholesky, [floats(2, 3, 3)]),
    ("fft", "a . -> a .", jnp.fft.rfft, [floats(2, 8)]),
]


@pytest.mark.parametrize(("primitive", "expected", "function", "args"), TABLE, ids=[row[0] for row in TABLE])
def test_what_can_be_split(primitive: str, expected: str, function: Callable, args: list[Shape]) -> None:
    assert text(nest_of(primitive, function, *args)) == expected


def test_one_position_of_a_cache_is_written_where_it_lies() -> None:
    def write(cache: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(cache, new, (0, at, 0))

    made = nest_of("dynamic_update_slice", write, floats(2, 8, 4), floats(2, 1, 4), ints())
    assert text(made) == "a b c, a . c, , ,  -> a b c"


def test_kernel_gradients_sum_over_the_image() -> None:
    traced = jax.make_jaxpr(kernel_gradient)(floats(2, 3, 16), floats(4, 3, 3))
    nests = [loop_nest(signature_of(e)) for e in equations(traced.jaxpr) if e.primitive.name == "conv_general_dilated"]
    spatial = [[loop.kind for loop in nest.loops if loop.halo] for nest in nests]
    assert ["sum"] in spatial


@pytest.mark.parametrize(
    ("primitive", "function", "args", "flops"),
    [
        ("dot_general", jnp.dot, [floats(2, 3, 4), floats(4, 5)], 2 * 2 * 3 * 4 * 5),
        ("ragged_dot_general", lax.ragged_dot, [floats(8, 4), floats(3, 4, 5), ints(3)], 2 * 8 * 4 * 5),
        ("conv_general_dilated", convolve, [floats(2, 3, 8), floats(4, 3, 3)], 2 * (2 * 4 * 8) * (3 * 3)),
        (
            "conv_general_dilated",
            partial(convolve, feature_group_count=3),
            [floats(2, 3, 8), floats(6, 1, 3)],
            2 * (2 * 6 * 8) * 3,
        ),
        ("reduce_sum", jnp.sum, [floats(2, 3)], 0),
    ],
)
def test_flops(primitive: str, function: Callable, args: list[Shape], flops: float) -> None:
    assert nest_of(primitive, function, *args).flops == flops


@pytest.mark.parametrize(
    ("primitive", "function", "args", "leads", "fusible"),
    [
        ("dot_general", jnp.dot, [floats(3, 4), floats(4, 5)], True, False),
        ("gather", lambda t, i: t[i], [floats(6, 4), ints(5)], True, False),
        ("scatter-add", lambda t, i: t.at[i].add(1.0), [floats(6), ints(5)], True, False),
        ("exp", jnp.exp, [floats(3)], False, True),
        ("reshape", lambda x: x.reshape(12), [floats(3, 4)], False, True),
        ("reduce_sum", jnp.sum, [floats(3)], False, False),
    ],
)
def test_who_leads_and_who_is_fused(
    primitive: str, function: Callable, args: list[Shape], leads: bool, fusible: bool
) -> None:
    made = nest_of(primitive, function, *args)
    assert (made.leads, made.fusible) == (leads, fusible)
