"""Products of float8 and int8: planned, run with the numbers of one device, and priced by the chip's own rate."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.hardware import find_chip

nn = pytest.importorskip("flax.linen")

X, W = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((16, 32), (32, 64)))


def quantize(x, dtype):
    scale = jnp.max(jnp.abs(x)) / jnp.finfo(dtype).max.astype(jnp.float32)
    return (x / scale).astype(dtype), scale


@jax.custom_vjp
def fp8_dot(x, w):
    """A product in float8 with one scale a tensor, as transformer libraries write it."""
    return fp8_forward(x, w)[0]


def scaled(left, right, contract):
    (a, a_scale), (b, b_scale) = left, right
    product = jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)
    return product * a_scale * b_scale


def fp8_forward(x, w):
    left, right = quantize(x, jnp.float8_e4m3fn), quantize(w, jnp.float8_e4m3fn)
    return scaled(left, right, ((1,), (0,))), (left, right)


def fp8_backward(saved, g):
    left, right = saved
    narrow = quantize(g, jnp.float8_e5m2)
    return scaled(narrow, right, ((1,), (1,))), scaled(left, narrow, ((0,), (0,)))


fp8_dot.defvjp(fp8_forward, fp8_backward)


def int8_dot(x, w):
    def whole(x):
        scale = jnp.max(jnp.abs(x)) / 127.0
        return jnp.round(x / scale).astype(jnp.int8), scale

    return scaled_int(whole(x), whole(w))


def scaled_int(left, right):
    (a, a_scale), (b, b_scale) = left, right
    product = jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    return product.astype(jnp.float32) * a_scale * b_scale


def flax_step(cls, variables, x):
    layer = nn.Dense(64, dot_general_cls=cls)

    def loss(variables):
        return jnp.mean(layer.apply(variables, x) ** 2)

    return jax.value_and_grad(loss)(variables)


def variables_of(cls):
    return nn.Dense(64, dot_general_cls=cls).init(jax.random.key(2), X)


def train(w, x):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(fp8_dot(x, w)) ** 2))(w)
    return w - gradient, value


@pytest.mark.sweep(3)
@pytest.mark.devices
@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")
@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
@pytest.mark.parametrize("name", ["scaled float8", "int8", "Flax, quantised", "Flax, direct"])
def test_numbers_are_those_of_one_device(name, mesh):
    flax = {"Flax, quantised": nn.Fp8DotGeneralOp, "Flax, direct": nn.Fp8DirectDotGeneralOp}
    if name in flax:
        function, args = partial(flax_step, flax[name]), (variables_of(flax[name]), X)
    else:
        function, args = (train, (W, X)) if name == "scaled float8" else (int8_dot, (X, W))
    abstract = mw.Mesh.abstract(mesh, alpha=1, beta=1)  # every product uses all axes that it can
    found = mw.parallelize(function, mesh=abstract, donate_argnums=())(*args)
    wanted = jax.jit(function)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, wanted)


LARGE = (jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16),) * 2


def in_dtype(dtype, x, w):
    x, w = x.astype(dtype), w.astype(dtype)
    return jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def dequantized(x, w):
    x, w = (a.astype(jnp.float8_e4m3fn).astype(jnp.bfloat16) * jnp.bfloat16(2) for a in (x, w))
    return x @ w


def product_of(function, chip):
    plan = mw.plan(function, *LARGE, cluster=f"1x1 {chip}")
    return next(op.load for op in plan.ops if op.label.endswith("dot_general")).dtype, plan


@pytest.mark.parametrize(
    ("function", "chip", "dtype"),
    [
        (partial(in_dtype, jnp.float8_e4m3fn), "h100", "float8_e4m3fn"),
        (partial(in_dtype, jnp.int8), "h100", "int8"),
        (dequantized, "h100", "float8_e4m3fn"),
        (dequantized, "mi300x", "float8_e4m3fn"),
        (dequantized, "tpu-v6e", "bfloat16"),  # XLA rewrites such products for GPUs alone
    ],
)
def test_products_are_priced_by_the_rate_of_their_numbers(function, chip, dtype):
    found, plan = product_of(function, chip)
    assert found == dtype and bool(plan.remarks) == (chip == "tpu-v6e")  # which has no rate of its own for float8
    wide = mw.plan(partial(in_dtype, jnp.bfloat16), *LARGE, cluster=f"1x1 {chip}")
    ratio = find_chip(chip).peak_flops(dtype) / find_chip(chip).peak_flops("bfloat16")
    assert (plan.step_s < 0.8 * wide.step_s) == (ratio > 1.5)


@pytest.mark.parametrize(
    ("function", "chip", "dtype"),
    [
        (partial(in_dtype, jnp.float8_e5m2), "a100-40gb", "float8_e5m2"),
        (dequantized, "a100-40gb", "float8_e4m3fn"),
        (partial(in_dtype, jnp.int8), "v100-32gb", "int8"),
        (partial(in_dtype, jnp.float8_e4m3fn), "tpu-v5p", "float8_e4m3fn"),  # it takes such numbers, no faster
    ],
)
def test_a_chip_without_the_unit_is_a_remark_with_the_remedy(function, chip, dtype):
    (remark,) = product_of(function, chip)[1].remarks
    assert f"1 product of {dtype} runs" in remark and f"has no matrix unit for {dtype}" in remark
    assert "Compute in bfloat16" in remark and "h100-sxm-80gb" in remark


def test_only_some_chips_have_a_unit_for_float4():
    (remark,) = product_of(partial(in_dtype, jnp.float4_e2m1fn), "h100")[1].remarks
    assert "h100-sxm-80gb has no matrix unit for float4_e2m1fn" in remark and "b200-sxm-180gb" in remark
    assert find_chip("h100").peak_flops("float4_e2m1fn") == find_chip("h100").peak_flops("bfloat16")
    assert not product_of(partial(in_dtype, jnp.float4_e2m1fn), "b200")[1].remarks


def test_sums_of_float8_are_left_to_one_device():
    def narrow(x, w):
        return jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float8_e4m3fn)

    args = [jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn) for shape in ((3, 4096), (4096, 5))]
    plan = mw.plan(narrow, *args, mesh=mw.Mesh.abstract((8,), 1, 1))
    assert not plan.collectives  # only the contracted dim divides by 8
