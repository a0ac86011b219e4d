"""Cases of the tracer's own primitives."""

import jax.numpy as jnp

from ..contract import Case
from . import Builder, Sizes


def carry(size: Sizes) -> Case:
    return Case(lambda x: x, [size.floats(*size.shape(2))], params={})


def second_slice(size: Sizes) -> Case:
    return Case(lambda xs: xs[1], [size.floats(3, *size.shape(2))], params={})


def stacked(size: Sizes) -> Case:
    """The same output at every iteration, so that one value stands for all of them."""
    return Case(lambda y: jnp.stack([y] * 3), [size.floats(*size.shape(2))], params={})


def second_branch(size: Sizes) -> Case:
    shape = size.shape(2)
    return Case(lambda x, y: y, [size.floats(*shape), size.floats(*shape)], params={})


CASES: list[tuple[str, Builder]] = [
    ("loop_carry", carry),
    ("loop_slice", second_slice),
    ("loop_stack", stacked),
    ("branch_merge", second_branch),
]
