"""What `test_lost.py` runs under `meshwright launch`: a run that saves in the background, and resumes.

Usage: in_launch.py DIRECTORY STEPS [PROCESS STEP]: this process is killed at this step, the first time.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw


def train_step(w, x):
    value, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(w)
    return w - 0.1 * grad, value


def init(key):
    return jax.random.normal(key, (8, 8))


def sample(number):
    return np.random.default_rng(number).normal(size=(16, 8)).astype(np.float32)


def train(directory, steps, killed=None):
    """The losses from where the run begins."""
    step = mw.parallelize(train_step, method=mw.DataParallel())
    key = jax.random.key(0)
    step.plan(jax.eval_shape(init, key), sample(0))
    saved = mw.saved_steps(directory)
    state = mw.restore(directory, like=step) if saved else mw.create_state(init, key, like=step)
    start = saved[-1] if saved else 0
    losses = {}
    for number in range(start, steps):
        if not saved and (jax.process_index(), number) == killed:
            Path(f"{directory}/killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state, loss = step(state, sample(number))
        losses[number] = float(loss)
        if number % 2:
            mw.save(directory, number + 1, state, keep=1, wait=False)
    assert mw.saved_steps(directory) == [steps], "no process sees a checkpoint that another is removing"
    return losses


if __name__ == "__main__":
    mw.initialize()
    killed = tuple(map(int, sys.argv[3:]))
    losses = train(sys.argv[1], int(sys.argv[2]), killed)
    print("losses", jax.device_count(), losses, flush=True)
