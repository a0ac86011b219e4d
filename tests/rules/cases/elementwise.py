"""Cases of elementwise operations."""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives

from ..contract import Case
from . import Builder, Sizes

FLOAT_UNARY = """
    abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2
    expm1 floor is_finite lgamma log log1p logistic neg rsqrt sign sin sinh sqrt square tan tanh
"""
FLOAT_BINARY = """
    add atan2 complex div eq ge gt igamma le lt max min mul ne nextafter polygamma pow rem sub zeta
"""
INT_UNARY = "clz population_count"
INT_BINARY = "mulhi shift_left shift_right_arithmetic shift_right_logical"
BIT_BINARY = {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}
TOTAL_ORDER = ("eq_to", "le_to", "lt_to")
# Annotations and moves: the value is unchanged, and JAX wants a mesh or a device to make them.
IDENTITIES = """
    layout_constraint pvary reshard sharding_constraint stop_gradient with_memory_space_constraint optimization_barrier
    device_put mesh_cast shard_alike
"""

Function = Callable[..., jax.Array]


def _floats(function: Function, arity: int) -> Builder:
    def build(size: Sizes) -> Case:
        shape = size.shape(2)
        return Case(function, [size.unit(*shape) for _ in range(arity)])

    return build


def _ints(function: Function, arity: int) -> Builder:
    def build(size: Sizes) -> Case:
        shape = size.shape(2)
        return Case(function, [size.ints(*shape) for _ in range(arity)])

    return build


def _complex(function: Function) -> Builder:
    def build(size: Sizes) -> Case:
        shape = size.shape(2)
        return Case(function, [size.unit(*shape) + 1j * size.unit(*shape)])

    return build


def beside_scalar(size: Sizes) -> Case:
    return Case(lax.mul_p.bind, [size.floats(*size.shape(3)), np.float32(3)])


def select_by_array(size: Sizes) -> Case:
    shape = size.shape(2)
    return Case(lax.select_n, [size.bools(*shape), size.floats(*shape), size.floats(*shape)])


def select_by_scalar(size: Sizes) -> Case:
    shape = size.shape(2)
    return Case(lax.select_n, [np.True_, size.floats(*shape), size.floats(*shape)])


def clamp_by_scalars(size: Sizes) -> Case:
    return Case(lax.clamp, [np.float32(-1), size.floats(*size.shape(2)), np.float32(2)])


def clamp_by_arrays(size: Sizes) -> Case:
    shape = size.shape(2)
    return Case(lax.clamp, [size.unit(*shape) - 2, size.floats(*shape), size.unit(*shape)])


def beta(size: Sizes) -> Case:
    shape = size.shape(2)
    return Case(lax.betainc, [size.unit(*shape) for _ in range(3)])


def threefry(size: Sizes) -> Case:
    shape = size.shape(1)
    words = [size.words(*shape) for _ in range(4)]
    return Case(primitives.threefry2x32_p.bind, words)


def threefry_by_one_key(size: Sizes) -> Case:
    shape = size.shape(2)
    return Case(primitives.threefry2x32_p.bind, [np.uint32(7), np.uint32(9), size.words(*shape), size.words(*shape)])


def identity(size: Sizes) -> Case:
    return Case(lambda x: x, [size.floats(*size.shape(2))], params={})


def zeros_like(size: Sizes) -> Case:
    return Case(lambda x: x * 0, [size.floats(*size.shape(2))], params={})


def barrier_of_two(size: Sizes) -> Case:
    return Case(
        lambda x, y: lax.optimization_barrier((x, y)), [size.floats(*size.shape(2)), size.floats(*size.shape(1))]
    )


CASES: list[tuple[str, Builder]] = [
    ("mul", beside_scalar),
    ("select_n", select_by_array),
    ("select_n", select_by_scalar),
    ("clamp", clamp_by_scalars),
    ("optimization_barrier", barrier_of_two),
]

ALIKE: list[tuple[str, Builder]] = [
    *((name, _floats(getattr(lax, name), 1)) for name in FLOAT_UNARY.split()),
    *((name, _floats(getattr(lax, name), 2)) for name in FLOAT_BINARY.split()),
    *((name, _ints(getattr(lax, name), 1)) for name in INT_UNARY.split()),
    *((name, _ints(getattr(lax, name), 2)) for name in INT_BINARY.split()),
    *((name, _ints(function, 2)) for name, function in BIT_BINARY.items()),
    *((name, _floats(getattr(primitives, f"{name}_p").bind, 2)) for name in TOTAL_ORDER),
    ("not", _ints(lax.bitwise_not, 1)),
    ("add_any", _floats(primitives.add_jaxvals_p.bind, 2)),
    ("round", _floats(lax.round, 1)),
    ("integer_pow", _floats(partial(lax.integer_pow, y=3), 1)),
    ("convert_element_type", _floats(partial(lax.convert_element_type, new_dtype=np.int32), 1)),
    ("reduce_precision", _floats(partial(lax.reduce_precision, exponent_bits=5, mantissa_bits=10), 1)),
    ("copy", _floats(primitives.copy_p.bind, 1)),
    ("name", _floats(partial(checkpoint_name, name="kept"), 1)),
    ("real", _complex(lax.real)),
    ("imag", _complex(lax.imag)),
    ("conj", _complex(lax.conj)),
    ("clamp", clamp_by_arrays),
    ("regularized_incomplete_beta", beta),
    ("threefry2x32", threefry),
    ("threefry2x32", threefry_by_one_key),
    ("zeros_like", zeros_like),
    *((name, identity) for name in IDENTITIES.split()),
]
