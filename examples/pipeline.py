"""Trains a small language model in four stages, each on two devices, with the numbers of one device.

    python examples/pipeline.py

Without accelerators it makes eight virtual devices of the CPU. The train step is ordinary JAX for one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshwright as mw

WORDS, WIDTH, LAYERS, BATCH, LENGTH = 64, 32, 4, 16, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def init(key):
    """The state: parameters, of which the embedding is also the output layer, and the optimizer's."""
    keys = jax.random.split(key, 2 * LAYERS + 1)
    blocks = [
        {"up": jax.random.normal(up, (WIDTH, 4 * WIDTH)) / 6, "down": jax.random.normal(down, (4 * WIDTH, WIDTH)) / 12}
        for up, down in zip(keys[1::2], keys[2::2], strict=True)
    ]
    params = {"embed": jax.random.normal(keys[0], (WORDS, WIDTH)) / 6, "blocks": blocks}
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def loss(params, batch):
    x = params["embed"][batch["words"]]
    for block in params["blocks"]:
        x = x + jax.nn.gelu(x @ block["up"]) @ block["down"]
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, batch["next"]).mean()


def train_step(state, batch):
    value, gradients = jax.value_and_grad(loss)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, {"loss": value}


def batches(count):
    """Sentences in which every word is followed by the next but two."""
    draw = np.random.default_rng(0)
    for _ in range(count):
        words = (draw.integers(0, WORDS, (BATCH, 1)) + 3 * np.arange(LENGTH + 1)) % WORDS
        yield {"words": words[:, :-1], "next": words[:, 1:]}


def main(steps: int = 20) -> list[float]:
    jax.config.update("jax_num_cpu_devices", 8)
    recipe = mw.ThreeD(data=1, tensor=2, pipeline=4, microbatch=4)  # or mw.Auto(pipeline=True), which chooses
    step = mw.parallelize(train_step, method=recipe)
    first = next(batches(1))
    state = mw.create_state(init, jax.random.key(0), like=step, example=(first,))  # every tensor is born in its stage
    print(step.last_plan)
    for number, stage in enumerate(step.last_plan.stages):
        print(f"stage {number} does, in order: {'; '.join(map(str, step.last_plan.instructions(number)[:6]))}; …")
        assert stage.mesh.num_devices == 2
    losses = []
    for batch in mw.batches(batches(steps), step):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    print(
        f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {steps} steps; "
        f"the embedding is on {state['params']['embed'].sharding}"
    )
    assert jnp.isfinite(losses[-1])
    return losses


if __name__ == "__main__":
    main()
