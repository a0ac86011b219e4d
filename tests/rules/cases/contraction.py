"""Cases of contractions."""

from functools import partial

import numpy as np
from jax import lax

from ..contract import Case, Shard
from . import Builder, Sizes


def matrix_product(size: Sizes) -> Case:
    m, k, n = size.shape(3)
    return Case(
        partial(lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ()))), [size.floats(m, k), size.floats(k, n)]
    )


def attention_scores(size: Sizes) -> Case:
    b, s, t, h, d = 2, 3, 1, 4, size()
    numbers = (((3,), (3,)), ((0, 2), (0, 2)))
    return Case(partial(lax.dot_general, dimension_numbers=numbers), [size.floats(b, s, h, d), size.floats(b, t, h, d)])


def two_contracted(size: Sizes) -> Case:
    b, s, d, f = size.shape(4)
    numbers = (((0, 1), (0, 1)), ((), ()))
    return Case(partial(lax.dot_general, dimension_numbers=numbers), [size.floats(b, s, d), size.floats(b, s, f)])


def inner_product(size: Sizes) -> Case:
    k = size()
    return Case(partial(lax.dot_general, dimension_numbers=(((0,), (0,)), ((), ()))), [size.floats(k), size.floats(k)])


def _group_sizes(size: Sizes, groups: int, rows: int) -> np.ndarray:
    """Sizes that do not fill all rows, so that the rows of no group are tried too."""
    return np.bincount(size.rng.integers(0, groups, max(rows - 1, 0)), minlength=groups).astype(np.int32)


def _clipped(sizes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Sizes of the groups within a shard's rows."""
    ends = np.cumsum(sizes).clip(rows[0], rows[-1] + 1)
    return np.diff(ends, prepend=rows[0]).astype(np.int32)


def ragged_rows(size: Sizes) -> Case:
    m, k, n, g = 4, 2, 2, 3

    def local(shard: Shard, x, matrices, sizes):
        # Rows before the shard's first group belong to nobody here: a group of zeros stands in for them.
        groups, rows = shard.rows(shard.nest.operands[1][0]), shard.rows(shard.nest.operands[0][0])
        before = _clipped(sizes, rows)[: groups[0]].sum()
        mine = np.concatenate([[before], _clipped(sizes, rows)[groups]]).astype(np.int32)
        return lax.ragged_dot(x, np.concatenate([np.zeros_like(matrices[:1]), matrices]), mine)

    return Case(lax.ragged_dot, [size.floats(m, k), size.floats(g, k, n), _group_sizes(size, g, m)], local)


def ragged_gradient(size: Sizes) -> Case:
    m, k, n, g = 4, 2, 3, 2
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

    def run(x, y, sizes):
        return lax.ragged_dot_general(x, y, sizes, numbers)

    def local(shard: Shard, x, y, sizes):
        mine = _clipped(sizes, shard.rows(shard.nest.operands[0][0]))
        return np.asarray(run(x, y, mine))[shard.result_rows(0)]

    return Case(run, [size.floats(m, k), size.floats(m, n), _group_sizes(size, g, m)], local)


def ragged_batch(size: Sizes) -> Case:
    b, m, k, n, g = 4, 2, 1, 2, 3
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [0], [])

    def run(x, y, sizes):
        return lax.ragged_dot_general(x, y, sizes, numbers)

    sizes = np.bincount(size.rng.integers(0, g, b), minlength=g).astype(np.int32)
    # Whatever the groups, batches are multiplied one by one; a shard only needs sizes that add up to its own.
    return Case(
        run,
        [size.floats(b, m, k), size.floats(b, k, n), sizes],
        lambda shard, x, y, sizes: run(x, y, _clipped(sizes, shard.rows(shard.nest.operands[0][0]))),
    )


def scaled_blocks(size: Sizes) -> Case:
    """Made by hand, with the product of the scaled numbers in the kernel's place."""

    def run(x, y, x_scale, y_scale):
        return np.einsum("bmk,bnk->bmn", x * x_scale.repeat(4, 2), y * y_scale.repeat(4, 2))

    b, m, n, k = 2, 3, 2, 2
    arrays = [size.floats(b, m, 4 * k), size.floats(b, n, 4 * k), size.floats(b, m, k), size.floats(b, n, k)]
    return Case(run, arrays, params={})


CASES: list[tuple[str, Builder]] = [
    *(("dot_general", build) for build in (matrix_product, attention_scores, two_contracted, inner_product)),
    *(("ragged_dot_general", build) for build in (ragged_rows, ragged_gradient, ragged_batch)),
    ("scaled_matmul_wrapper", scaled_blocks),
]
