"""What `test_elastic.py` runs on hosts that leave and come: every loss is noted with the number of devices.

Usage: in_elastic.py FOLDER; the run ends at the step that the file ``stop`` in the folder holds.
"""

import logging
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw

ROWS, EVERY = 12, 2


def train_step(state, x):
    value, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * grad, "n": state["n"] + 1}, value


def init(key):
    return {"w": jax.random.normal(key, (8, 8)), "n": jnp.int32(0)}


def sample(number):
    return np.random.default_rng(number).normal(size=(ROWS, 8)).astype(np.float32)


def train(folder):
    step, key, directory = mw.parallelize(train_step), jax.random.key(0), folder / "checkpoints"
    step.plan(jax.eval_shape(init, key), sample(0))
    is_new = not mw.saved_steps(directory)
    state = mw.create_state(init, key, like=step) if is_new else mw.restore(directory, like=step)
    number = int(state["n"])
    while number < (int((folder / "stop").read_text()) if (folder / "stop").exists() else 10**9):
        state, loss = step(state, sample(number))
        number += 1
        loss = float(loss)
        if jax.process_index() == 0:
            with open(folder / "losses", "a") as file:
                file.write(f"{number} {loss!r} {jax.device_count()}\n")
        if mw.preempted():
            mw.save(directory, number, state)
            break
        if number % EVERY == 0:
            mw.save(directory, number, state, keep=2, wait=False)
        time.sleep(0.1)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    logging.getLogger("meshwright").setLevel(logging.INFO)
    mw.initialize()
    train(Path(sys.argv[1]))
