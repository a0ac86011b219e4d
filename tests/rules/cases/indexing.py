"""Cases of slices."""

from functools import partial

import numpy as np
from jax import lax

from ..contract import Case, Shard
from . import Builder, Sizes


def strided(size: Sizes) -> Case:
    a, b = size.shape(2)

    def local(shard: Shard, x):
        return lax.slice(x, (0, 1, 0), (x.shape[0], 5, x.shape[2]), (1, 2, 1))

    return Case(
        partial(lax.slice, start_indices=(0, 1, 0), limit_indices=(a, 5, b), strides=(1, 2, 1)),
        [size.floats(a, 6, b)],
        local,
    )


def at_computed_start(size: Sizes) -> Case:
    a, b = size.shape(2)

    def run(x, i, j, k, sizes=(a, 2, b)):
        return lax.dynamic_slice(x, (i, j, k), sizes)

    def local(shard: Shard, x, i, j, k):
        return run(x, i, j, k, shard.result_shape())

    zero = np.int32(0)
    return Case(run, [size.floats(a, 6, b), zero, np.int32(3), zero], local)


def write_one_position(size: Sizes) -> Case:
    """A KV cache: one position of the sequence is written, on the shard that has it."""
    b, h = size.shape(2)

    def run(cache, new, i, j, k):
        return lax.dynamic_update_slice(cache, new, (i, j, k))

    def local(shard: Shard, cache, new, i, j, k):
        at = j - shard.operand_start(0, 1)
        return run(cache, new, i, at, k) if 0 <= at < cache.shape[1] else cache

    zero = np.int32(0)
    return Case(run, [size.floats(b, 4, h), size.floats(b, 1, h), zero, np.int32(2), zero], local)


def write_a_window(size: Sizes) -> Case:
    b, h = size.shape(2)

    def run(cache, new, i, j, k):
        return lax.dynamic_update_slice(cache, new, (i, j, k))

    zero = np.int32(0)
    return Case(run, [size.floats(b, 6, h), size.floats(b, 3, h), zero, np.int32(2), zero])


CASES: list[tuple[str, Builder]] = [
    ("slice", strided),
    ("dynamic_slice", at_computed_start),
    ("dynamic_update_slice", write_one_position),
    ("dynamic_update_slice", write_a_window),
]
