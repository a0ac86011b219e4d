"""Cases of reductions."""

from functools import partial

import numpy as np
from jax import lax

from ..contract import Case
from . import Builder, Sizes

FLOATS = {
    "reduce_sum": lax.reduce_sum,
    "reduce_max": lax.reduce_max,
    "reduce_min": lax.reduce_min,
    "reduce_prod": lax.reduce_prod,
}
INTS = {"reduce_and": lax.reduce_and, "reduce_or": lax.reduce_or, "reduce_xor": lax.reduce_xor}


def _middle(function, ints: bool) -> Builder:
    def middle(size: Sizes) -> Case:
        shape = size.shape(3)
        return Case(partial(function, axes=(1,)), [size.ints(*shape) if ints else size.floats(*shape)])

    return middle


def to_scalar(size: Sizes) -> Case:
    return Case(partial(lax.reduce_sum, axes=(0, 1)), [size.floats(*size.shape(2))])


def all_true(size: Sizes) -> Case:
    return Case(partial(lax.reduce_and, axes=(0,)), [size.bools(*size.shape(2))])


def largest(size: Sizes) -> Case:
    return Case(partial(lax.argmax, axis=1, index_dtype=np.int32), [size.unit(*size.shape(3))])


def smallest(size: Sizes) -> Case:
    return Case(partial(lax.argmin, axis=0, index_dtype=np.int32), [size.unit(*size.shape(3))])


def sum_and_count(size: Sizes) -> Case:
    """A reduction of two arrays at once by a function JAX does not recognise."""

    def run(x, y, x0, y0):
        return lax.reduce((x, y), (x0, y0), lambda a, b: (a[0] + b[0], a[1] + 2 * b[1]), (1,))

    shape = (2, 3, 1)
    zero = np.float32(0)
    return Case(run, [size.floats(*shape), size.floats(*shape), zero, zero])


CASES: list[tuple[str, Builder]] = [
    ("reduce_sum", to_scalar),
    ("reduce_max", _middle(lax.reduce_max, ints=False)),
    ("reduce_and", all_true),
    ("argmax", largest),
    ("reduce", sum_and_count),
]

ALIKE: list[tuple[str, Builder]] = [
    *((name, _middle(function, ints=False)) for name, function in FLOATS.items()),
    *((name, _middle(function, ints=True)) for name, function in INTS.items()),
    ("argmin", smallest),
]
