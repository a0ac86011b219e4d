"""A vision transformer in Flax nnx, split into graph and parameters, trained on all devices.

nnx modules are changed in place; a step from state to state is made of them by `nnx.split` and `nnx.merge`.

    python examples/nnx_vit.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshwright as mw

IMAGE, PATCH, HIDDEN, HEADS, LAYERS, CLASSES = 32, 8, 128, 4, 2, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention_norm, self.mlp_norm = nnx.LayerNorm(HIDDEN, rngs=rngs), nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, HIDDEN, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(HIDDEN, 4 * HIDDEN, rngs=rngs), nnx.Linear(4 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class ViT(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Conv(3, HIDDEN, (PATCH, PATCH), strides=(PATCH, PATCH), rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), ((IMAGE // PATCH) ** 2, HIDDEN)))
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, HIDDEN) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


GRAPH = nnx.graphdef(nnx.eval_shape(lambda: ViT(nnx.Rngs(0))))  # what is no array; nothing is allocated


def init(key):
    params = nnx.state(ViT(nnx.Rngs(key)), nnx.Param)
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def loss(params, batch):
    logits = nnx.merge(GRAPH, params)(batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


@mw.parallelize
def train_step(state, batch):
    value, grads = jax.value_and_grad(loss)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(grads, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, value


def stripes(size, seed):
    """Noisy images of stripes; the class says in which of four directions they run."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, size)
    angle = (np.pi * labels / CLASSES)[:, None, None]
    down, right = np.mgrid[:IMAGE, :IMAGE]
    wave = np.sin(down * np.cos(angle) + right * np.sin(angle) + rng.uniform(0, 6, (size, 1, 1)))
    images = wave[..., None] + rng.normal(0, 2.0, (size, IMAGE, IMAGE, 3))
    return {"images": images.astype(np.float32), "labels": labels.astype(np.int32)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--devices", type=int, default=8, help="virtual devices, where there are no accelerators")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    example = stripes(options.batch, 0)
    state = mw.create_state(init, jax.random.key(0), like=train_step, example=(example,))
    print(*str(train_step.plan(state, example)).splitlines()[:4], sep="\n")  # print(plan) tells it all

    every = max(1, options.steps // 5)
    for step, batch in enumerate(mw.batches((stripes(options.batch, n) for n in range(options.steps)), train_step)):
        state, value = train_step(state, batch)
        if step % every == 0 or step == options.steps - 1:
            print(f"step {step}: loss {value:.5f}")

    model = nnx.merge(GRAPH, jax.device_get(state["params"]))  # a module again, here on the host
    fresh = stripes(options.batch, options.steps)
    print(f"accuracy on fresh images: {jnp.mean(model(fresh['images']).argmax(-1) == fresh['labels']):.3f}")


if __name__ == "__main__":
    main()
