"""A mixture of experts in plain JAX, in microbatches, with the methods side by side.

Shapes in comments: B batch, S tokens of an example, D hidden, F feed-forward, E experts, C slots of an expert.

    python examples/moe.py
    python examples/moe.py --compare      # also times Auto, data parallel and ZeRO-3 on the devices here
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw

SEQ, HIDDEN, FFN, EXPERTS, RATE = 64, 64, 256, 8, 0.2
SLOTS = 2 * SEQ // EXPERTS  # twice what an even spread needs


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "router": 0.1 * jax.random.normal(keys[0], (HIDDEN, EXPERTS)),
        "up": jax.random.normal(keys[1], (EXPERTS, HIDDEN, FFN)) * HIDDEN**-0.5,
        "down": jax.random.normal(keys[2], (EXPERTS, FFN, HIDDEN)) * FFN**-0.5,
    }


def mixture(params, x):
    """Sends each token to its best expert, as long as that has a slot free; B S D → B S D, and how uneven it was."""
    chances = jax.nn.softmax(x @ params["router"])  # B S E
    chosen = jax.nn.one_hot(chances.argmax(-1), EXPERTS)
    slot = jnp.cumsum(chosen, axis=1) * chosen - 1  # -1 for experts that were not chosen
    sent = jax.nn.one_hot(slot.astype(jnp.int32), SLOTS)  # B S E C; all zero where there is no slot
    inputs = jnp.einsum("bsec,bsd->ebcd", sent, x)
    hidden = jax.nn.relu(jnp.einsum("ebcd,edf->ebcf", inputs, params["up"]))
    outputs = jnp.einsum("ebcf,efd->ebcd", hidden, params["down"])
    weights = sent * chances[..., None]
    uneven = EXPERTS * jnp.mean(chosen.mean(axis=1) * chances.mean(axis=1))
    return jnp.einsum("bsec,ebcd->bsd", weights, outputs), uneven


def loss(params, batch):
    y, uneven = mixture(params, batch["x"])
    return jnp.mean((y - batch["y"]) ** 2) + 0.01 * uneven


@mw.parallelize(microbatches=2)  # two halves of the batch one after the other, gradients added up and sent once
def train_step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value


def sample(size, seed):
    """Tokens around eight centres, each centre with a linear map of its own to learn."""
    fixed, rng = np.random.default_rng(0), np.random.default_rng((1, seed))
    centres, maps = fixed.normal(size=(8, HIDDEN)), fixed.normal(size=(8, HIDDEN, HIDDEN)) * HIDDEN**-0.5
    kind = rng.integers(0, 8, (size, SEQ))
    x = centres[kind] + 0.3 * rng.normal(size=(size, SEQ, HIDDEN))
    y = np.empty_like(x)
    for k in range(8):
        y[kind == k] = x[kind == k] @ maps[k]
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--compare", action="store_true", help="time other methods, too")
    parser.add_argument("--devices", type=int, default=8, help="virtual devices, where there are no accelerators")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    example = sample(options.batch, 0)
    params = mw.create_state(init, jax.random.key(0), like=train_step, example=(example,))
    print(train_step.plan(params, example))
    if options.compare:
        print(mw.compare(train_step, params, example, methods=[mw.Auto(), mw.DataParallel(), mw.Zero(3)]))

    every = max(1, options.steps // 5)
    for step, batch in enumerate(mw.batches((sample(options.batch, n) for n in range(options.steps)), train_step)):
        params, value = train_step(params, batch)
        if step % every == 0 or step == options.steps - 1:
            print(f"step {step}: loss {value:.5f}")


if __name__ == "__main__":
    main()
