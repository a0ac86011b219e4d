"""Runs a train step by an exported plan, in a process that cannot import Meshwright, and compares with one device.

Called with the folder of the exported file. The model is written as somebody would who has never heard of Meshwright.
"""

import sys

sys.modules["meshwright"] = None  # importing it fails
sys.path.insert(0, sys.argv[1])
# ruff: noqa: E402

import jax
import jax.numpy as jnp
import numpy as np
import sharding_plan as plan


def loss(params, tokens, split=lambda x, scope: x, layer_of=lambda layer: layer):
    def layer(weights, h):
        with jax.named_scope("mlp"):
            up = split(jax.nn.relu(h @ weights["up"]), "mlp/dot_general")
            return h + jnp.tanh(up @ weights["down"])

    h = params["embed"][tokens[:, :-1]]
    for weights in params["layers"]:
        h = layer_of(layer)(weights, h)
    scores = jax.nn.log_softmax(h @ params["embed"].T)
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], 2).mean()


def step_with(value_and_grad):
    def train_step(state, tokens):
        value, grads = value_and_grad(state["params"], tokens)
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads)
        return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mu), "mu": mu}, value

    return train_step


train_step = step_with(jax.value_and_grad(loss))


def state():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype("f4") / 8

    layers = [{"up": draw(32, 128), "down": draw(128, 32)} for _ in range(2)]
    params = {"embed": draw(64, 32), "layers": layers}
    return {"params": params, "mu": jax.tree.map(np.zeros_like, params)}


def tokens():
    return np.random.default_rng(1).integers(0, 64, (32, 9)).astype("i4")


def main():
    mesh = plan.make_mesh()
    alone, expected = jax.jit(train_step)(state(), tokens())
    alone, expected = jax.jit(train_step)(alone, tokens())

    def as_planned(params, tokens):
        return loss(params, tokens, plan.constrain, plan.checkpoint)

    placed = jax.device_put(state(), plan.shardings(state(), "state", mesh))
    step = plan.jit(step_with(plan.value_and_grad(as_planned)), placed, tokens())
    text = step.lower(placed, tokens()).compile().as_text()
    placed, _ = step(placed, tokens())
    placed, value = step(placed, tokens())

    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), placed, alone)
    up = placed["params"]["layers"][0]["up"]
    kinds = [kind for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all") if f" {kind}(" in text]
    print(len(up.sharding.device_set), up.addressable_shards[0].data.shape, *kinds)


if __name__ == "__main__":
    main()
