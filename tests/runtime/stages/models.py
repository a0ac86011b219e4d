"""A small model whose stages have everything that is hard to cut: tied weights, clipping, metrics, dropout."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshwright as mw

WORDS = 11


def waves(number, *shape):
    """Weights between -1 and 1, others for each number: JAX's generator takes longer to compile than all the rest."""
    return jnp.sin(0.37 * number + jnp.arange(float(math.prod(shape))) ** 2).reshape(shape)


@cache
def build(layers=4, width=8, rows=16, tied=True, dropout=0.0, optimizer=None, scan=False):
    """The initialiser, the train step and a batch of a residual network on word numbers.

    The same functions are returned for the same options, so that JAX compiles what one device computes only once.
    """
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))

    def init(key):
        blocks = [{"w": waves(i, width, width) / 4, "b": jnp.zeros(width)} for i in range(layers)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks) if scan else blocks
        params = {"embed": waves(layers, WORDS, width), "blocks": stacked}
        if not tied:
            params["out"] = jax.random.normal(key, (width, WORDS))
        return {"params": params, "opt": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

    def loss(params, batch, key):
        x = params["embed"][batch["x"]]
        if scan:
            x, _ = jax.lax.scan(lambda x, b: (x + jnp.tanh(x @ b["w"] + b["b"]), None), x, params["blocks"])
        for number, block in enumerate(() if scan else params["blocks"]):
            y = jnp.tanh(x @ block["w"] + block["b"])
            if dropout:
                kept = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - dropout, y.shape)
                y = jnp.where(kept, y / (1 - dropout), 0)
            x = x + y
        logits = x @ (params["embed"].T if tied else params["out"])
        errors = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return errors.mean(), (logits.argmax(-1) == batch["y"]).mean()

    def train_step(state, batch):
        key = jax.random.fold_in(jax.random.key(7), state["step"])
        (value, right), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"], batch, key)
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": value, "accuracy": right, "norm": optax.tree.norm(gradients)}
        return {"params": params, "opt": opt, "step": state["step"] + 1}, metrics

    draw = np.random.default_rng(0)
    return init, train_step, {name: draw.integers(0, WORDS, (rows,)) for name in ("x", "y")}


def compared(init, train_step, batch, method, steps=3, cluster=None):
    """Runs a pipeline and one device side by side; the largest difference of all numbers, and the parallel step.

    The method is a recipe, for as many devices as it takes or for a cluster, or a plan.
    """
    if cluster is None and not isinstance(method, mw.Plan):
        cluster = f"1x{method.data * method.tensor * method.pipeline} cpu"
    step = mw.parallelize(train_step, cluster=cluster, method=method)
    state = mw.create_state(init, jax.random.key(0), like=step, example=(batch,))
    alone, one = jax.tree.map(np.asarray, state), jax.jit(train_step)
    worst = 0.0
    for _ in range(steps):
        alone, expected = one(alone, batch)
        state, found = step(state, batch)
        pairs = zip(jax.tree.leaves((alone, expected)), jax.tree.leaves((state, found)), strict=True)
        worst = max(worst, *(float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max()) for a, b in pairs))
    return worst, step
