"""A byte-level GPT in Flax, trained on all devices with a one-device train step.

    python examples/flax_gpt.py                                    # made-up sentences; 8 virtual devices on a laptop
    python examples/flax_gpt.py --text book.txt --steps 500 --checkpoints runs/book

With `--checkpoints` a run saves every 50 steps and at its end, and one that was interrupted goes on where it stopped,
on however many devices there are then.
"""

import argparse
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import meshwright as mw

VOCAB, SEQ, HIDDEN, HEADS, LAYERS = 256, 64, 128, 4, 2
OPTIMIZER = optax.adamw(3e-3)  # made once: it is part of the state, and one made anew would be another


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(y, y, mask=mask)
        y = nn.gelu(nn.Dense(4 * HIDDEN)(nn.LayerNorm()(x)))
        return x + nn.Dense(HIDDEN)(y)


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, HIDDEN)(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (SEQ, HIDDEN))
        mask = nn.make_causal_mask(tokens)
        for _ in range(LAYERS):
            x = Block()(x, mask)
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


def loss(params, batch):
    logits = GPT().apply({"params": params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def init(key):
    params = GPT().init(key, jnp.zeros((1, SEQ), jnp.int32))["params"]
    return TrainState.create(apply_fn=None, params=params, tx=OPTIMIZER)


@mw.parallelize  # all local devices, the fastest plan that fits; the function itself is for one device
def train_step(state, batch):
    value, grads = jax.value_and_grad(loss)(state.params, batch)
    return state.apply_gradients(grads=grads), value


evaluate = mw.follow(loss, train_step)  # takes the parameters where training keeps them


def read(path):
    """The bytes of a file, or of sentences that a small vocabulary makes up."""
    if path:
        return np.frombuffer(path.read_bytes(), np.uint8)
    words = "the a one old young mesh ship plan wright device sails builds splits finds slowly well . ,".split()  # noqa: SIM905
    chosen = np.random.default_rng(0).choice(words, 20_000)
    return np.frombuffer(" ".join(chosen).encode(), np.uint8)


def sample(text, size, seed):
    """A batch of random places in the text; the same for the same seed, so that a run can go on where it stopped."""
    starts = np.random.default_rng(seed).integers(0, len(text) - SEQ, size)
    rows = np.stack([text[s : s + SEQ + 1] for s in starts]).astype(np.int32)
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a file to learn from")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--checkpoints", type=Path, help="a folder to save to, and to go on from")
    parser.add_argument("--devices", type=int, default=8, help="virtual devices, where there are no accelerators")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    text = read(options.text)
    split = len(text) * 9 // 10
    key = jax.random.key(0)
    plan = train_step.plan(jax.eval_shape(init, key), sample(text[:split], options.batch, 0))
    print(*str(plan).splitlines()[:4], sep="\n")  # the story in short; print(plan) tells it all

    if options.checkpoints and options.checkpoints.is_dir():
        state = mw.restore(options.checkpoints, like=train_step)
        print(f"going on from step {state.step}")
    else:
        state = mw.create_state(init, key, like=train_step)

    numbers = range(int(state.step), options.steps)
    feed = (sample(text[:split], options.batch, n) for n in numbers)
    for step, batch in zip(numbers, mw.batches(feed, train_step), strict=False):
        state, value = train_step(state, batch)
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {value:.5f}")
        if options.checkpoints and (step % 50 == 49 or step == options.steps - 1):
            mw.save(options.checkpoints, step + 1, state, keep=2)

    print(f"held out: loss {evaluate(state.params, sample(text[split:], options.batch, 0)):.5f}")


if __name__ == "__main__":
    main()
