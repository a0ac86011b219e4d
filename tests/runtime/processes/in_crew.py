"""What `test_initialize.py` runs in each of two processes that `mw.initialize` joins; the second is killed.

Usage: in_crew.py PROCESS PORT
"""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw


def train_step(w, x):
    return w - jax.grad(lambda w: jnp.mean(x @ w))(w), x.max()


def main(process, port):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    mw.initialize(f"127.0.0.1:{port}", 2, process, timeout=120, heartbeat=10)
    step = mw.parallelize(train_step, cluster="2x1 cpu", method=mw.DataParallel())
    evaluate = mw.follow(lambda w, x: jnp.mean(x @ w), step)
    w = np.ones((2, 1), np.float32)
    for i, x in enumerate(mw.batches([np.ones((4, 2), np.float32)] * 4, step)):
        if (i, process) == (2, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        w, _ = step(w, x)
        print("loss", float(evaluate(w, x)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
