"""Training on a Ray cluster that survives lost workers. Without a cluster it starts one on this machine:

    python examples/ray_train.py
    python examples/ray_train.py --workers 2 4 --devices 2     # as many workers as there is room for
    RAY_ADDRESS=auto python examples/ray_train.py --gpus 8 --storage gs://bucket/runs

If a worker is lost, Ray starts all of them again, on what is left. The loop below then plans for the devices there are,
restores the last complete checkpoint onto them and continues with the same numbers. Run again with the same name and
storage, it continues where it ended.
"""

import argparse
import os
from pathlib import Path

import ray
import ray.train

import meshwright.ray

BATCH, HIDDEN, LAYERS, RATE, MOMENTUM = 48, 64, 4, 0.05, 0.9


def train_loop(config):
    """What each worker runs; it is called again after workers were lost."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import meshwright as mw

    def init(key):
        keys = jax.random.split(key, LAYERS)
        params = [jax.random.normal(k, (HIDDEN, HIDDEN)) * HIDDEN**-0.5 for k in keys]
        return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}

    def loss(params, batch):
        x = batch["x"]
        for weights in params:
            x = x + jnp.tanh(x @ weights)
        return jnp.mean((x - batch["y"]) ** 2)

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - RATE * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, value

    def sample(number):
        """The batch of a step; the same whenever and wherever it is drawn."""
        x = np.random.default_rng(number).normal(size=(BATCH, HIDDEN)).astype(np.float32)
        return {"x": x, "y": np.sin(3 * x)}

    def part(batch):
        """This worker's rows of a batch: how many workers there are may change from start to start."""
        rows = BATCH // jax.process_count()
        first = jax.process_index() * rows
        return jax.tree.map(lambda leaf: leaf[first : first + rows], batch)

    train_step = mw.parallelize(step)
    key = jax.random.key(0)
    train_step.plan(jax.eval_shape(init, key), sample(0))
    start, state = meshwright.ray.restore(like=train_step) or (0, mw.create_state(init, key, like=train_step))
    process = f"worker {jax.process_index()} of {jax.process_count()} (process {os.getpid()})"
    print(f"{process}: {jax.device_count()} devices, from step {start}", flush=True)

    numbers = range(start, config["steps"])
    for number, batch in zip(numbers, mw.batches((part(sample(n)) for n in numbers), train_step), strict=True):
        state, value = train_step(state, batch)
        is_asked = mw.preempted()  # the machine of some worker is about to be taken away
        if number % config["every"] == config["every"] - 1 or number == numbers[-1] or is_asked:
            meshwright.ray.save(number + 1, state, {"step": number + 1, "loss": float(value)})
        if is_asked:
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[4], help="how many, or the least and the most")
    parser.add_argument("--devices", type=int, default=2, help="virtual devices of each worker, without GPUs")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each worker")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--storage", default=str(Path("runs").absolute()), help="what all workers can reach")
    parser.add_argument("--name", default="ray_train")
    options = parser.parse_args()

    if "RAY_ADDRESS" not in os.environ:
        ray.init(num_cpus=max(options.workers), include_dashboard=False)
    scaling = ray.train.ScalingConfig(
        num_workers=tuple(options.workers) if len(options.workers) == 2 else options.workers[0],
        use_gpu=options.gpus > 0,
        resources_per_worker={"GPU": options.gpus} if options.gpus else {"CPU": 1},
    )
    trainer = meshwright.ray.Trainer(
        train_loop,
        scaling,
        ray.train.RunConfig(
            name=options.name,
            storage_path=options.storage,
            failure_config=ray.train.FailureConfig(max_failures=10),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=3),
        ),
        train_loop_config={"steps": options.steps, "every": options.every},
        devices_per_worker=1 if options.gpus else options.devices,
    )
    result = trainer.fit()
    for _, metrics in result.best_checkpoints:
        print(f"step {metrics['step']}: loss {metrics['loss']:.5f}")


if __name__ == "__main__":
    main()
