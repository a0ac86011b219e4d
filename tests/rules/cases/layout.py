"""Cases of arrays made, cut and joined by position."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..contract import Case, Shard
from . import Builder, Sizes


def count(size: Sizes) -> Case:
    shape = size.shape(2)

    def local(shard: Shard):
        return lax.broadcasted_iota(np.int32, shard.result_shape(), 1) + shard.result_rows(1)[0]

    return Case(lambda: lax.broadcasted_iota(np.int32, shape, 1), [], local)


def count_in_two_words(size: Sizes) -> Case:
    """Counters of random bits: the high and low words of each element's position."""
    shape = size.shape(2)

    def local(shard: Shard):
        low = shard.result_rows(0)[:, None] * shape[1] + shard.result_rows(1)
        return [np.zeros_like(low, np.uint32), low.astype(np.uint32)]

    def run():
        low = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
        return [np.zeros_like(low), low]

    return Case(run, [], local, params={"shape": shape})


def uninitialised(size: Sizes) -> Case:
    shape = size.shape(2)
    return Case(lambda: np.zeros(shape), [], lambda shard: np.zeros(shard.result_shape()), params={"shape": shape})


def uninitialised_scalar(size: Sizes) -> Case:
    return Case(lambda: np.zeros(()), [], params={})


def join(size: Sizes) -> Case:
    a, b, c, d = size.shape(4)
    return Case(lambda *xs: lax.concatenate(xs, 1), [size.floats(a, b, d), size.floats(a, c, d)])


def cut(size: Sizes) -> Case:
    return Case(partial(lax.split, sizes=(1, 3), axis=1), [size.floats(size(), 4, size())])


def side_by_side(size: Sizes) -> Case:
    shape = size.shape(2)
    return Case(lambda *xs: jnp.stack(xs, 1), [size.floats(*shape), size.floats(*shape)], params={"axis": 1})


def apart(size: Sizes) -> Case:
    return Case(lambda x: [x[:, 0], x[:, 1]], [size.floats(size(), 2, size())], params={"axis": 1})


def repeat(size: Sizes) -> Case:
    """A shard of the repetitions repeats less often."""

    def local(shard: Shard, x):
        reps = [whole // part for whole, part in zip(shard.result_shape(), x.shape, strict=True)]
        return np.tile(x, reps)

    return Case(lambda x: np.tile(x, (2, 1, 3)), [size.floats(*size.shape(3))], local, params={"reps": (2, 1, 3)})


def pad_one_dim(size: Sizes) -> Case:
    config = ((0, 0, 0), (1, 2, 1), (0, 0, 0))
    return Case(partial(lax.pad, padding_config=config), [size.floats(*size.shape(3)), np.float32(7)])


def cut_by_negative_padding(size: Sizes) -> Case:
    config = ((-1, 1, 0), (0, 0, 0))
    return Case(partial(lax.pad, padding_config=config), [size.floats(4, size()), np.float32(7)])


def backwards(size: Sizes) -> Case:
    return Case(partial(lax.rev, dimensions=(1,)), [size.floats(*size.shape(3))])


CASES: list[tuple[str, Builder]] = [
    ("iota", count),
    ("iota_2x32_shape", count_in_two_words),
    ("empty", uninitialised),
    ("empty2", uninitialised_scalar),
    ("platform_index", uninitialised_scalar),
    ("concatenate", join),
    ("split", cut),
    ("stack", side_by_side),
    ("unstack", apart),
    ("tile", repeat),
    ("pad", pad_one_dim),
    ("pad", cut_by_negative_padding),
    ("rev", backwards),
]
