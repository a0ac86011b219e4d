"""Which way of splitting is best follows what was measured."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import meshwright as mw
from meshwright.hardware.load import cluster
from meshwright.profiler.local import measured_cluster
from tests.profiler.surveys import collectives, compute, survey


def machine(**figures):
    """Eight CPU devices as a survey with these figures would show them."""
    readings = [*compute(**figures), *collectives(8, alpha_s=2e-4), *collectives(2, alpha_s=1e-4)]
    return measured_cluster(cluster("1x8 cpu"), survey(readings))


def stem(weights, images):
    """What a network for images begins with: few features, wide windows."""

    def loss(weights):
        layout = ("NHWC", "HWIO", "NHWC")
        made = lax.conv_general_dilated(images, weights, (2, 2), "SAME", dimension_numbers=layout)
        return jnp.mean(jnp.square(made))

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - gradient, value


STEM = (jax.ShapeDtypeStruct((7, 7, 3, 16), jnp.float32), jax.ShapeDtypeStruct((16, 32, 32, 3), jnp.float32))


@pytest.mark.parametrize("fetch_s, split", [(5e-8, "batch"), (0.0, "features")])
def test_slow_fetches_keep_features_together(fetch_s, split):
    plan = mw.plan(stem, *STEM, cluster=machine(fetch_s=fetch_s), method=mw.Auto(mesh_shapes=[(8,)]))
    (forward,) = [op for op in plan.ops if "conv" in op.label and op.phase == "forward"]
    made = forward.results[0]
    assert made[{"batch": 0, "features": 3}[split]] == ("x",)


def adam(state, batch):
    weights, moment = state
    gradient = jax.grad(lambda w: jnp.mean(jnp.square(batch @ w)))(weights)
    moment = 0.9 * moment + jnp.square(gradient)
    return (weights - gradient / (jnp.sqrt(moment) + 1e-8), moment), ()


def test_slow_functions_spread_the_update():
    """Where roots and divisions are slow, a whole update on every device is no longer as good as one in parts."""
    matrix = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    args = (adam, (matrix, matrix), jax.ShapeDtypeStruct((64, 512), jnp.float32))
    excess = []
    for special_s in (0.0, 1e-8):
        here = machine(special_s=special_s)
        whole, parts = (mw.plan(*args, cluster=here, method=m).cost.compute for m in (mw.DataParallel(), mw.Zero(3)))
        excess.append(whole - parts)
    assert excess[1] - excess[0] == pytest.approx(2 * 512 * 512 * (1 - 1 / 8) * 1e-8, rel=1e-6)


def test_sums_of_gradients_start_together():
    """XLA combines them into one collective, so that many small ones cost no more starts than one large one."""

    def step(weights, batch):
        def loss(weights):
            x = batch
            for w in weights:
                x = jnp.tanh(x @ w)
            return jnp.mean(x)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    here = machine()
    matrix, batch = jax.ShapeDtypeStruct((32, 32), jnp.float32), jax.ShapeDtypeStruct((64, 32), jnp.float32)
    starts = []
    for layers in (2, 6):
        plan = mw.plan(step, [matrix] * layers, batch, cluster=here, method=mw.DataParallel())
        sums = [c for c in plan.collectives if c.purpose == "gradient"]
        beta_s = sum(here.mesh((8,)).collective_s(c.kind, (0,), c.bytes, start=0.0) for c in sums)
        starts.append(sum(c.seconds for c in sums) - beta_s)
        assert len(sums) == layers
    assert starts == pytest.approx([2e-4, 2e-4], rel=1e-6)
