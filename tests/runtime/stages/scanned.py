"""A model that loops over its layers, with everything that such loops have: several carries, per-layer inputs, outputs
for each layer, an inner loop, a checkpoint; and plans of it with cuts at any layer."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.runtime.stages.models import waves

WIDTH, WORDS = 4, 7


@cache
def build(layers, checkpoint=False, rows=8, optimizer=None):
    """The initialiser, the train step and a batch; the same functions for the same options, which JAX compiles once."""
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))

    def init(key):
        blocks = {"w": waves(0, layers, WIDTH, WIDTH) / 2, "b": jnp.zeros((layers, WIDTH))}
        ends = {"embed": waves(1, WORDS, WIDTH), "out": waves(2, WIDTH, WORDS)}
        params = {"blocks": blocks, **ends}
        return {"params": params, "opt": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

    def layer(carry, xs):
        block, key, index = xs
        noise = jax.random.normal(key, (WIDTH,)) / (1 + index)  # the same for all examples, so for all microbatches
        y = jax.lax.fori_loop(0, 2, lambda _, y: jnp.tanh(y @ block["w"] + block["b"]), carry["x"])
        return {"x": carry["x"] + y * (1 + noise), "skip": carry["skip"]}, (y**2).mean()

    def loss(params, batch, key):
        x = params["embed"][batch["x"]]
        xs = params["blocks"], jax.random.split(key, layers), jnp.arange(layers)
        carry, balance = jax.lax.scan(jax.checkpoint(layer) if checkpoint else layer, {"x": x, "skip": x}, xs)
        logits = (carry["x"] + carry["skip"]) @ params["out"]
        errors = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return errors.mean() + 0.1 * balance.sum(), balance

    def train_step(state, batch):
        key = jax.random.fold_in(jax.random.key(7), state["step"])
        (value, balance), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"], batch, key)
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}
        return new, {"loss": value, "balance": balance}

    draw = np.random.default_rng(0)
    return init, train_step, {name: draw.integers(0, WORDS, (rows,)) for name in ("x", "y")}


def recut(plan, sizes):
    """A plan with other numbers of layers in its virtual stages, which come in the order of the layers."""
    ends = np.cumsum(sizes).tolist()
    chunks = list(zip([0, *ends], ends, strict=False))
    count = len(plan.stages)
    held = {t.path: t for stage in plan.stages for t in stage.tensors}
    stages = [
        replace(stage, layers=chunks[s], chunks=tuple(chunks[s::count]), tensors=tuple(held.values()))
        for s, stage in enumerate(plan.stages)
    ]
    return replace(plan, stages=tuple(stages))


@cache
def with_sums(layers=4):
    """A train step whose loop over layers carries more than the activation: a counter and sums over the examples; one
    of its weights is read in every layer, before the loop and after it. And its arguments."""

    def layer(scale, carry, w):
        x, count, seen, balance = carry
        y = jnp.tanh((x * scale) @ w)
        return (x + y / (1 + seen), count + 1, seen + 0.5, balance + (y**2).mean()), (y > 0).sum()

    def loss(params, x):
        start = x * params["scale"], jnp.int32(3), jnp.zeros(()), (params["scale"] ** 2).sum()
        step = jax.checkpoint(partial(layer, params["scale"]))
        (y, count, _, balance), positive = jax.lax.scan(step, start, params["w"])
        return ((y * params["scale"]) ** 2).mean() + 0.1 * balance, (count, balance, positive)

    def train_step(params, x):
        (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), (value, *metrics)

    params = {"w": waves(0, layers, WIDTH, WIDTH) / 2, "scale": 1 + waves(1, WIDTH) / 4}
    return train_step, (params, waves(2, 8, WIDTH))
