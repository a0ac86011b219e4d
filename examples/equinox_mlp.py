"""An Equinox MLP that learns two spirals, on all devices with a one-device train step.

The module goes in and comes out as it is: its activation functions and sizes are no arrays and stay what they are.

    python examples/equinox_mlp.py
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshwright as mw

OPTIMIZER = optax.adam(1e-3)


def init(key):
    model = eqx.nn.MLP(in_size=2, out_size=2, width_size=256, depth=3, activation=jax.nn.gelu, key=key)
    return {"model": model, "optimizer": OPTIMIZER.init(eqx.filter(model, eqx.is_array))}


def loss(model, batch):
    logits = jax.vmap(model)(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@mw.parallelize
def train_step(state, batch):
    value, grads = eqx.filter_value_and_grad(loss)(state["model"], batch)
    updates, optimizer = OPTIMIZER.update(grads, state["optimizer"])
    return {"model": eqx.apply_updates(state["model"], updates), "optimizer": optimizer}, value


def accuracy(model, batch):
    return jnp.mean(jnp.argmax(jax.vmap(model)(batch["x"]), axis=-1) == batch["y"])


evaluate = mw.follow(accuracy, train_step)  # takes the model where training keeps it


def spirals(size, seed):
    """Points on two spirals, half a turn apart."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, size)
    turn = rng.uniform(0.5, 4.5, size) * np.pi
    angle = turn + np.pi * y
    x = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) / 6 + rng.normal(0, 0.02, (size, 2))
    return {"x": x.astype(np.float32), "y": y.astype(np.int32)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--devices", type=int, default=8, help="virtual devices, where there are no accelerators")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    example = spirals(options.batch, 0)
    state = mw.create_state(init, jax.random.key(0), like=train_step, example=(example,))
    print(train_step.plan(state, example))

    every = max(1, options.steps // 5)
    for step, batch in enumerate(mw.batches((spirals(options.batch, n) for n in range(options.steps)), train_step)):
        state, value = train_step(state, batch)
        if step % every == 0 or step == options.steps - 1:
            print(f"step {step}: loss {value:.5f}")
    print(f"accuracy on fresh points: {evaluate(state['model'], spirals(options.batch, options.steps)):.3f}")


if __name__ == "__main__":
    main()
