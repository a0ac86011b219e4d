"""A share computes every operation of a plan at the shapes of one device, and as much work as the plan says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.plans.tensor import Tensor
from meshwright.rehearsal.share.local_equation import local_shape
from meshwright.rehearsal.share.program import POOL, SCALE, Share, drawn
from meshwright.rules import loop_nest

H100S = "1x8 h100"
CASES = [
    ("gpt-tiny", (8,), "zero3", {}),
    ("gpt-tiny", (2, 4), "tensor", {"dropout": 0.1}),
    ("llama-tiny", (2, 4), "auto", {"scan": True, "checkpoint": True}),
    ("llama-tiny", (8,), "zero3", {"scan": True}),
    ("moe-tiny", (2, 4), "auto", {}),
    ("mixtral-tiny", (8,), "tensor", {}),
    ("wide-resnet-tiny", (8,), "data", {}),
    ("wide-resnet-tiny", (2, 4), "auto", {}),
    ("vit-tiny", (2, 2, 2), "auto", {"attention": "plain"}),
    ("bert-tiny", (8,), "zero3", {}),
]


def share_of(name, mesh, method, options):
    example = zoo.build(name, **options)
    plan = mw.plan(example.train_step, example.state, example.batch, cluster=H100S, mesh=mesh, method=method)
    return plan, Share.of(plan, plan.origin)


def traced_flops(function, types):
    graph = trace(function, *types).graph
    return sum(op.trips * loop_nest(op.signature).flops for op in graph.ops)


@pytest.mark.sweep(4)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "method", "options"), CASES)
def test_shapes_and_work_of_one_device(name, mesh, method, options):
    plan, share = share_of(name, mesh, method, options)
    assert [t.shape for t in share.types] == [local_shape(t.shape, t.spec, plan.mesh.shape) for t in share.arguments]
    made = jax.eval_shape(share.run, *share.types)
    expected = [(local_shape(t.shape, t.spec, plan.mesh.shape), t.dtype) for t in share.results]
    assert [(x.shape, str(x.dtype)) for x in made] == expected
    assert share.device.whole == set()
    assert traced_flops(share.run, share.types) == pytest.approx(plan.flops, rel=2e-3)


def loss(x, w):
    return jnp.tanh(x @ w["up"]) @ w["down"]


def step(w, x):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(loss(x, w) ** 2))(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient), value


def weights(rows=16, width=32):
    key = jax.random.key(0)
    return {"up": jax.random.normal(key, (rows, width)), "down": jax.random.normal(key, (width, rows))}


@pytest.mark.devices
def test_on_one_device_the_share_is_the_program():
    args = weights(), jax.random.normal(jax.random.key(1), (8, 16))
    plan = mw.plan(step, *args, cluster="1x1 h100", mesh=(1,))
    share, device = Share.of(plan, plan.origin), jax.devices()[0]
    found = share.compile(device)(*share.draw(device, jax.tree.leaves(args)))
    for mine, other in zip(found, jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.devices
def test_the_first_devices_shards_are_used_and_the_state_is_handed_on():
    args = weights(), jnp.ones((16, 16))
    plan = mw.plan(step, *args, cluster=H100S, mesh=(8,), method="data")
    share, device = Share.of(plan, plan.origin), jax.devices()[1]
    values = share.draw(device, jax.tree.leaves(args))
    assert [v.shape for v in values] == [t.shape for t in share.types] and values[-1].shape == (2, 16)
    after = share.step(share.compile(device), values)
    own, _ = step(args[0], args[1][:2])  # an all-reduce is the device's own gradient
    np.testing.assert_allclose(after[0], own["down"], rtol=1e-5)
    assert after[0].devices() == {device} and after[-1].shape == (2, 16)


def test_values_are_drawn_by_role_and_large_arrays_repeat_a_pool():
    def draw(role, dtype, shape=(2, 1000), seed=0):
        return drawn(Tensor("x", shape, dtype, (), role), jax.ShapeDtypeStruct(shape, dtype), seed, 50)

    assert np.std(draw("parameters", "float32")) == pytest.approx(SCALE, rel=0.1)
    assert np.std(draw("data", "bfloat16").astype("float32")) == pytest.approx(1, rel=0.1)
    assert draw("data", "bfloat16").dtype == jnp.bfloat16 and not draw("optimizer", "float32").any()
    assert set(np.unique(draw("data", "uint8"))) == set(range(50)) and draw("data", "float32", ()).shape == ()
    assert not np.array_equal(draw("data", "float32"), draw("data", "float32", seed=1))
    large = draw("data", "float32", (3, POOL)).ravel()
    assert large.shape == (3 * POOL,) and np.array_equal(large[:POOL], large[POOL : 2 * POOL])


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_convolutions_split_by_pixels_keep_their_shapes(padding):
    def run(image, kernel):
        made = jax.lax.conv_general_dilated(image, kernel, (2, 2), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum(made**2)

    types = jax.ShapeDtypeStruct((1, 32, 32, 4), "float32"), jax.ShapeDtypeStruct((2, 2, 4, 4), "float32")
    split = mw.Manual({"image": (None, "x"), "kernel": ()})
    plan = mw.plan(jax.grad(run, 1), *types, cluster="1x4 h100", mesh=(4,), method=split)
    share = Share.of(plan, plan.origin)
    jax.eval_shape(share.run, *share.types)
    assert share.types[0].shape == (1, 8, 32, 4) and share.device.whole == set()
    assert traced_flops(share.run, share.types) == pytest.approx(plan.flops)
