"""Cases of sorting, selection and cumulative operations."""

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


def keys_alone(size: Sizes) -> Case:
    return Case(partial(lax.sort, dimension=1), [size.unit(*size.shape(3))])


def keys_with_values(size: Sizes) -> Case:
    shape = size.shape(2)
    return Case(lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), [size.unit(*shape), size.ints(*shape)])


def best_experts(size: Sizes) -> Case:
    return Case(partial(lax.top_k, k=1), [size.unit(*size.shape(3))])


def best_of_first_dim(size: Sizes) -> Case:
    return Case(partial(lax.top_k, k=2, axis=0), [size.unit(4, size(), 1)])


def nearly_best(size: Sizes) -> Case:
    return Case(partial(lax.approx_max_k, k=2, reduction_dimension=1), [size.unit(size(), 6, size())])


def _middle(function) -> Builder:
    def middle(size: Sizes) -> Case:
        return Case(partial(function, axis=1), [size.unit(*size.shape(3))])

    return middle


def reverse(size: Sizes) -> Case:
    return Case(partial(lax.cumsum, axis=0, reverse=True), [size.floats(*size.shape(2))])


CASES: list[tuple[str, Builder]] = [
    ("sort", keys_alone),
    ("sort", keys_with_values),
    ("top_k", best_experts),
    ("top_k", best_of_first_dim),
    ("approx_top_k", nearly_best),
    ("cumsum", reverse),
]

ALIKE: list[tuple[str, Builder]] = [(name, _middle(function)) for name, function in FUNCTIONS.items()]
