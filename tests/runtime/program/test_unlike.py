"""Steps unlike the zoo's, split over abstract meshes: what was planned is what XLA makes of it."""

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from tests.draws import normal

pytestmark = pytest.mark.devices


def r(*shape, scale=0.3):
    return normal(*shape, seed=sum(shape), scale=scale)


def descend(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def adapters(state, batch):
    """Low-rank adapters beside weights that stay as they are."""
    frozen, tuned = state

    def loss(tuned):
        hidden = jax.nn.gelu(batch["x"] @ (frozen["in"] + tuned["in_a"] @ tuned["in_b"]))
        return jnp.mean((hidden @ frozen["out"] + hidden @ tuned["out_a"] @ tuned["out_b"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(tuned)
    return (frozen, descend(tuned, grads)), value


def adapters_example():
    tuned = {"in_a": r(32, 4), "in_b": r(4, 64), "out_a": r(64, 4), "out_b": r(4, 16)}
    return ({"in": r(32, 64), "out": r(64, 16)}, tuned), {"x": r(16, 32), "y": r(16, 16)}


def one_by_one(params, x):
    """Examples that a loop takes one after the other."""
    grads = jax.grad(lambda p: jnp.mean(jax.lax.map(lambda row: jnp.tanh(row @ p).sum(), x)))(params)
    return params - grads, None


def one_by_one_example():
    return r(12, 12), r(8, 6, 12)


def pooled(params, x):
    """A mean over positions, whose gradient is the same for all of them: a virtual value that is read in two ways."""

    def loss(p):
        hidden = jnp.tanh(x @ p["in"])
        return jnp.mean((hidden @ p["out"] + p["bias"]).mean(1) ** 2)

    return descend(params, jax.grad(loss)(params)), None


def pooled_example():
    return {"in": r(16, 32), "out": r(32, 8), "bias": r(8)}, r(8, 6, 16)


STEPS = {
    "a mean over positions": (pooled, pooled_example, (3,), mw.Auto(), 1),
    "adapters in a loop": (adapters, adapters_example, (2, 4), mw.Auto(), 2),
    "a loop over examples": (one_by_one, one_by_one_example, (8,), mw.DataParallel(), 1),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_is_sent_was_planned(name):
    step, example, shape, method, microbatches = STEPS[name]
    mesh = mw.Mesh.abstract(shape, alpha=0.0, beta=(1e-9, 1e-10, 1e-10)[: len(shape)])
    plan = mw.parallelize(step, mesh=mesh, method=method, microbatches=microbatches).plan(*example())
    for pair in plan.verify().collectives.values():
        assert pair.compiled == pytest.approx(pair.planned, rel=0.02, abs=64)
