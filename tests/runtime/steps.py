"""A small train step, with parameters and batches for it."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.draws import normal

CPU = "1x8 cpu"


def loss(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["in"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def train_step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value}


def params(seed=0, hidden=32):
    return {"in": normal(16, hidden, seed=seed), "out": normal(hidden, 8, seed=seed + 1000)}


def batch(size=16):
    rng = np.random.default_rng(size)
    return {"x": rng.normal(size=(size, 16)).astype("f4"), "y": rng.normal(size=(size, 8)).astype("f4")}
