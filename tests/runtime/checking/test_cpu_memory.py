"""Planned memory is within 35% of what XLA's CPU backend allocates, over the zoo and beyond it, and bytes are exact.

Virtual CPU devices stand in for a cluster: the model of memory is that of GPUs, with few exceptions.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import zoo
from tests.compiling import KEEPING_CHECKPOINTS, QUICK

pytestmark = pytest.mark.devices

# Every model once, with methods and meshes in turn: all of them together take minutes (see benchmarks/compiled.py).
# GPT and Llama under tensor parallelism are in ../program/test_joined_sums.py, where their bytes are compared as well.
CASES = [
    ("mlp", {"batch": 32}, mw.Auto(), (4, 2)),
    ("bert-tiny", {"batch": 16, "layers": 1}, mw.TensorParallel(), (2, 4)),
    ("llama-tiny", {"batch": 16, "checkpoint": True}, mw.Auto(), (2, 4)),
    ("llama-tiny", {"batch": 16, "scan": True, "checkpoint": True}, mw.Zero(stage=3), (8,)),
    ("moe-tiny", {}, mw.Auto(), (2, 4)),
    ("mixtral-tiny", {"batch": 32, "layers": 1}, mw.Auto(), (4, 2)),
    ("vit-tiny", {"batch": 32, "layers": 1}, mw.TensorParallel(), (2, 4)),
    ("wide-resnet-tiny", {"batch": 8, "layers": 1}, mw.Zero(stage=3), (8,)),
]
NARROW_CASES = [
    ("llama-tiny", {"scan": True}, mw.TensorParallel(), (2, 4)),
    ("llama-tiny", {"checkpoint": True}, mw.Zero(stage=3), (8,)),
    ("mixtral-tiny", {"layers": 1}, mw.Zero(stage=3), (8,)),
    ("wide-resnet-tiny", {"layers": 1}, mw.Zero(stage=3), (8,)),
]


def is_close(memory):
    return abs(memory.planned / memory.compiled - 1) <= 0.35


@cache
def multiplies_bfloat16():
    """Whether the CPUs of this machine multiply bfloat16 as it is (x86 with AMX), so that XLA does not widen it."""
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    return "f32" not in jax.jit(jnp.matmul).lower(matrix, matrix).compile().as_text()


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("name", "options", "method", "mesh"), CASES, ids=str)
def test_planned_memory_is_close_to_what_the_cpu_backend_allocates(name, options, method, mesh):
    example = zoo.build(name, dtype="float32", **options)
    plan = mw.plan(example.train_step, example.state, example.batch, cluster="1x8 cpu", mesh=mesh, method=method)
    assert is_close(plan.verify(compiler_options=QUICK).memory)


def check(plan):
    """What is sent and held in bfloat16, against the compiled program."""
    found = plan.verify(compiler_options=KEEPING_CHECKPOINTS)
    assert found.bytes.ratio == pytest.approx(1, abs=1e-3)
    if multiplies_bfloat16():
        pytest.skip("the CPUs here multiply bfloat16 as it is: products take less memory than is planned")
    assert is_close(found.memory)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "options", "method", "mesh"), NARROW_CASES, ids=str)
def test_bfloat16_is_sent_and_held_as_float32(name, options, method, mesh):
    example = zoo.build(name, dtype="bfloat16", batch=16, **options)
    args = (example.train_step, example.state, example.batch)
    check(mw.plan(*args, cluster="1x8 cpu", mesh=mesh, method=method))


narrow, wide = (partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.bfloat16, jnp.float32))


def descent(loss):
    """A step of gradient descent."""

    def step(params, *batch):
        value, slope = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, d: p - 0.1 * d.astype(p.dtype), params, slope), value

    return step


def mixed(params, x, y):
    for up, down in jax.tree.map(lambda p: p.astype(jnp.bfloat16), params):
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean(jnp.square((x - y).astype(jnp.float32)))


def pure(params, x, y):
    for up, down in params:
        x = x + jax.nn.silu(x @ up) @ down
    return jnp.mean(jnp.square(x - y)).astype(jnp.float32)


def recurrent(params, xs, y):
    def cell(h, x):
        h = jnp.tanh(h @ params[0] + x @ params[1])
        return h, h

    _, made = jax.lax.scan(jax.checkpoint(cell), jnp.zeros_like(y), xs)
    return jnp.mean(jnp.square((made.mean(0) - y).astype(jnp.float32)))


def stacked(params, x, y):
    def layer(x, weights):
        up, down = (w.astype(jnp.bfloat16) for w in weights)
        normed = x.astype(jnp.float32)
        normed *= jax.lax.rsqrt(jnp.mean(normed * normed, -1, keepdims=True) + 1e-6)
        return x + jax.nn.silu(normed.astype(jnp.bfloat16) @ up) @ down, None

    return jnp.mean(jnp.square((jax.lax.scan(layer, x, params)[0] - y).astype(jnp.float32)))


PROGRAMS = {
    "float32 weights": (mixed, [(wide((64, 256)), wide((256, 64)))] * 3, narrow((256, 64)), narrow((256, 64))),
    "bfloat16 weights": (pure, [(narrow((64, 256)), narrow((256, 64)))] * 3, narrow((256, 64)), narrow((256, 64))),
    "checkpointed loop": (recurrent, (narrow((64, 64)), narrow((32, 64))), narrow((16, 64, 32)), narrow((64, 64))),
    "stacked layers": (stacked, (wide((4, 64, 256)), wide((4, 256, 64))), narrow((256, 64)), narrow((256, 64))),
}


@pytest.mark.parametrize(
    "method", [mw.Zero(stage=3, recompute="as written"), mw.TensorParallel(recompute="as written")], ids=str
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_so_it_is_in_programs_of_mixed_precision(name, method):
    loss, *args = PROGRAMS[name]
    mesh = (8,) if isinstance(method, mw.Zero) else (2, 4)
    check(mw.plan(descent(loss), *args, cluster="1x8 cpu", mesh=mesh, method=method))


def pooled(params, images, labels):
    """A small convolutional net; pools that overlap, and such that do not."""
    (first, second, last), dims = params, ("NHWC", "HWIO", "NHWC")
    for kernel, window in ((first, (1, 3, 3, 1)), (second, (1, 2, 2, 1))):
        images = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=dims)
        images = jax.nn.relu(images)
        images = jax.lax.reduce_window(images, -jnp.inf, jax.lax.max, window, (1, 2, 2, 1), "SAME")
    logits = images.reshape(len(images), -1) @ last
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


@pytest.mark.parametrize("method", [mw.Auto(), mw.Zero(stage=3), mw.DataParallel()], ids=str)
def test_finding_the_largest_of_each_window_takes_memory(method):
    params = [wide((3, 3, 3, 32)), wide((3, 3, 32, 64)), wide((4096, 16))]
    args = params, wide((32, 32, 32, 3)), jax.ShapeDtypeStruct((32,), jnp.int32)
    step = jax.jit(descent(pooled), donate_argnums=0)
    plan = mw.plan(step, *args, cluster="1x8 cpu", mesh=(8,), method=method)
    assert is_close(plan.verify(compiler_options=QUICK).memory)


def ragged(params, tokens, labels):
    """Experts that each multiply the tokens that chose them."""
    route, up, down, out = params
    rows = tokens.reshape(-1, tokens.shape[-1])
    gates = jax.nn.softmax(rows @ route)
    chosen = jnp.argmax(gates, -1)
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=len(up))
    made = jax.lax.ragged_dot(jax.nn.gelu(jax.lax.ragged_dot(rows[order], up, sizes)), down, sizes)
    made = jnp.zeros_like(rows).at[order].set(made) * jnp.take_along_axis(gates, chosen[:, None], 1)
    logits = (rows + made).reshape(tokens.shape).mean(1) @ out
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


@pytest.mark.parametrize("method", [mw.Auto(), mw.Zero(stage=3), mw.TensorParallel()], ids=str)
def test_ragged_products_take_their_rows_once_for_every_group(method):
    params = [wide((64, 8)), wide((8, 64, 128)), wide((8, 128, 64)), wide((64, 16))]
    args = params, wide((16, 32, 64)), jax.ShapeDtypeStruct((16,), jnp.int32)
    step = jax.jit(descent(ragged), donate_argnums=0)
    found = mw.plan(step, *args, cluster="1x8 cpu", mesh=(8,), method=method).verify(compiler_options=QUICK)
    assert is_close(found.memory)
    assert found.bytes.ratio == pytest.approx(1, abs=1e-3)  # gradients of a mean are sent before they are spread


def test_an_abstract_mesh_is_planned_as_accelerators_are():
    example = zoo.build("mlp", dtype="float32", batch=16)
    args = (example.train_step, example.state, example.batch)
    plans = [
        mw.plan(*args, mesh=mw.Mesh.abstract((8,), 1.0, 1e-3), method=mw.Zero(stage=3)),
        mw.plan(*args, cluster="1x8 h200", mesh=(8,), method=mw.Zero(stage=3)),
        mw.plan(*args, cluster="1x8 cpu", mesh=(8,), method=mw.Zero(stage=3)),
    ]
    assert [plan.mesh.is_cpu for plan in plans] == [False, False, True]
