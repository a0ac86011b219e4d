"""Cases of windowed reductions."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives

from ..contract import Case, Shard
from . import Builder, Sizes

FILL = {"reduce_window_sum": 0, "reduce_window_max": -np.inf, "reduce_window_min": np.inf}


def _params(rank: int, **given: Any) -> dict[str, Any]:
    ones = (1,) * rank
    return {
        "window_dimensions": ones,
        "window_strides": ones,
        "padding": ((0, 0),) * rank,
        "base_dilation": ones,
        "window_dilation": ones,
    } | given


def _reach(shard: Shard, params: dict[str, Any]) -> tuple[dict[int, tuple[int, int]], dict[str, Any]]:
    """What a shard fetches of its neighbours, and the parameters with which it then reduces."""
    reach, padding = {}, list(params["padding"])
    for d, (made, whole) in enumerate(zip(shard.result_shape(), shard.operands[0].shape, strict=True)):
        mine = shard.operand_shape(0)[d]
        if mine == whole:
            continue
        width = (params["window_dimensions"][d] - 1) * params["window_dilation"][d] + 1
        low = params["padding"][d][0]
        reach[d] = (low, (made - 1) * params["window_strides"][d] + width - low - mine)
        padding[d] = (0, 0)
    return reach, params | {"padding": tuple(padding)}


def _window(primitive: str, shape: tuple[int, ...], size: Sizes, **given: Any) -> Case:
    params = _params(len(shape), **given)
    bind = getattr(primitives, f"{primitive}_p").bind

    def local(shard: Shard, x: np.ndarray) -> jax.Array:
        reach, mine = _reach(shard, params)
        return bind(shard.with_halo(0, reach, FILL[primitive]), **mine)

    return Case(partial(bind, **params), [size.floats(*shape)], local)


def average_pool(size: Sizes) -> Case:
    return _window("reduce_window_sum", (2, 8), size, window_dimensions=(1, 2), window_strides=(1, 2))


def overlapping_max_pool(size: Sizes) -> Case:
    given = {"window_dimensions": (1, 3), "window_strides": (1, 2), "padding": ((0, 0), (1, 0))}
    return _window("reduce_window_max", (size(), 8), size, **given)


def same_size_min(size: Sizes) -> Case:
    given = {"window_dimensions": (3, 1), "padding": ((1, 1), (0, 0)), "window_dilation": (2, 1)}
    return _window("reduce_window_min", (8, size()), size, **(given | {"padding": ((2, 2), (0, 0))}))


def valid_window_stays_whole(size: Sizes) -> Case:
    return _window("reduce_window_sum", (size(), 7), size, window_dimensions=(1, 3))


def by_a_function(size: Sizes) -> Case:
    """Two arrays reduced together by a function JAX does not recognise."""

    def run(x, y, x0, y0):
        def add(a, b):
            return a[0] + b[0], a[1] * 2 + b[1]

        return lax.reduce_window((x, y), (x0, y0), add, (1, 2), (1, 2), "VALID")

    zero = np.float32(0)
    shape = (size(), 4)
    return Case(run, [size.floats(*shape), size.floats(*shape), zero, zero])


POOL = {"window_dimensions": (1, 2), "window_strides": (1, 2), "padding": ((0, 0), (0, 0))}
OVERLAP = {"window_dimensions": (1, 3), "window_strides": (1, 2), "padding": ((0, 0), (0, 1))}


def _scatter_add(size: Sizes, params: dict[str, Any]) -> Case:
    bind = partial(primitives.select_and_scatter_add_p.bind, select_prim=lax.ge_p, **params)
    n = size()
    return Case(bind, [size.floats(n, 4), size.unit(n, 8)])


def gradient_of_max_pool(size: Sizes) -> Case:
    return _scatter_add(size, POOL)


def gradient_of_overlapping_max_pool(size: Sizes) -> Case:
    return _scatter_add(size, OVERLAP)


def tangent_of_max_pool(size: Sizes) -> Case:
    ones = {"base_dilation": (1, 1), "window_dilation": (1, 1)}
    bind = partial(primitives.select_and_gather_add_p.bind, select_prim=lax.ge_p, **POOL, **ones)
    n = size()
    return Case(bind, [size.floats(n, 8), size.unit(n, 8)])


def scatter_by_a_function(size: Sizes) -> Case:
    """As the gradient of max pooling, made by hand: JAX turns the usual functions into the case above."""

    def run(x, source, init):
        return primitives.select_and_scatter_add_p.bind(source, x, select_prim=lax.ge_p, **POOL)

    n = size()
    return Case(run, [size.unit(n, 8), size.floats(n, 4), np.float32(0)], params=POOL)


CASES: list[tuple[str, Builder]] = [
    ("reduce_window_sum", average_pool),
    ("reduce_window_max", overlapping_max_pool),
    ("reduce_window_min", same_size_min),
    ("reduce_window_sum", valid_window_stays_whole),
    ("reduce_window", by_a_function),
    ("select_and_scatter_add", gradient_of_max_pool),
    ("select_and_scatter_add", gradient_of_overlapping_max_pool),
    ("select_and_gather_add", tangent_of_max_pool),
    ("select_and_scatter", scatter_by_a_function),
]
