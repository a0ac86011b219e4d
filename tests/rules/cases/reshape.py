"""Cases of shape changes."""

from functools import partial
from itertools import pairwise

import numpy as np
from jax import lax

from ..contract import Case, Shard
from . import Builder, Sizes


def _reshape(source: tuple[int, ...], target: tuple[int, ...], size: Sizes) -> Case:
    return Case(
        partial(lax.reshape, new_sizes=target),
        [size.floats(*source)],
        lambda shard, x: lax.reshape(x, shard.result_shape()),
    )


def split_heads(size: Sizes) -> Case:
    b, s, h, d = size(), size(), 4, 3  # never the same shape on both sides: that is no reshape
    return _reshape((b, s, h * d), (b, s, h, d), size)


def merge_tokens(size: Sizes) -> Case:
    b, s, d = 2, size() + 1, size()
    return _reshape((b, s, d), (b * s, d), size)


def merge_and_split(size: Sizes) -> Case:
    a, b, c, d = 2, 3, 4, size()
    return _reshape((a, b * c, d), (a * b, c * d), size)


def major_part_in_common(size: Sizes) -> Case:
    return _reshape((6, 4, 5), (4, 6, 5), size)


def ones_come_and_go(size: Sizes) -> Case:
    a, b = size.shape(2)
    return _reshape((1, a, 1, b), (a, 1, 1, 1, b, 1), size)


def transposed_first(size: Sizes) -> Case:
    def run(x, sizes=(6, 4)):
        return lax.reshape(x, sizes, (2, 0, 1))

    return Case(run, [size.floats(2, 4, 3)], lambda shard, x: run(x, shard.result_shape()))


def random_factors(size: Sizes) -> Case:
    factors = [int(n) for n in size.rng.choice([1, 2, 3, 4], 5)] + [2]
    source, target = _grouped(factors, size), _grouped(factors, size)
    return _reshape(source, target if target != source else (*source, 1), size)


def _grouped(factors: list[int], size: Sizes) -> tuple[int, ...]:
    """Merges runs of factors into dims at random."""
    cuts = sorted({0, len(factors), *size.rng.integers(1, len(factors), 2).tolist()})
    return tuple(int(np.prod(factors[i:j])) for i, j in pairwise(cuts))


def turn(size: Sizes) -> Case:
    return Case(partial(lax.transpose, permutation=(2, 0, 1)), [size.floats(*size.shape(3))])


def widen(size: Sizes) -> Case:
    a, b, c, d = size.shape(4)

    def local(shard: Shard, x):
        return lax.broadcast_in_dim(x, shard.result_shape(), (1, 2))

    return Case(
        partial(lax.broadcast_in_dim, shape=(a, b, c, d), broadcast_dimensions=(1, 2)), [size.floats(b, 1)], local
    )


def scalar_to_all(size: Sizes) -> Case:
    shape = size.shape(2)
    return Case(
        partial(lax.broadcast_in_dim, shape=shape, broadcast_dimensions=()),
        [np.float32(2)],
        lambda shard, x: lax.broadcast_in_dim(x, shard.result_shape(), ()),
    )


def drop_ones(size: Sizes) -> Case:
    return Case(partial(lax.squeeze, dimensions=(0, 2)), [size.floats(1, size(), 1, size())])


def same_width(size: Sizes) -> Case:
    return Case(partial(lax.bitcast_convert_type, new_dtype=np.int32), [size.floats(*size.shape(2))])


def narrower(size: Sizes) -> Case:
    return Case(partial(lax.bitcast_convert_type, new_dtype=np.uint8), [size.floats(*size.shape(2))])


def wider(size: Sizes) -> Case:
    words = size.rng.integers(0, 256, (*size.shape(2), 4)).astype(np.uint8)
    return Case(partial(lax.bitcast_convert_type, new_dtype=np.uint32), [words])


CASES: list[tuple[str, Builder]] = [
    *(
        ("reshape", build)
        for build in (
            split_heads,
            merge_tokens,
            merge_and_split,
            major_part_in_common,
            ones_come_and_go,
            transposed_first,
            random_factors,
        )
    ),
    ("transpose", turn),
    ("broadcast_in_dim", widen),
    ("broadcast_in_dim", scalar_to_all),
    ("squeeze", drop_ones),
    ("bitcast_convert_type", same_width),
    ("bitcast_convert_type", narrower),
    ("bitcast_convert_type", wider),
]
