"""Cases of cumulative operations."""

from functools import partial

from jax import lax

from ..contract import Case
from . import Builder, Sizes

FUNCTIONS = {
    "cumsum": lax.cumsum,
    "cumprod": lax.cumprod,
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "cumlogsumexp": lax.cumlogsumexp,
}


def _middle(function) -> Builder:
    def middle(size: Sizes) -> Case:
        return Case(partial(function, axis=1), [size.unit(*size.shape(3))])

    return middle


def reverse(size: Sizes) -> Case:
    return Case(partial(lax.cumsum, axis=0, reverse=True), [size.floats(*size.shape(2))])


CASES: list[tuple[str, Builder]] = [("cumsum", reverse)]

ALIKE: list[tuple[str, Builder]] = [(name, _middle(function)) for name, function in FUNCTIONS.items()]
