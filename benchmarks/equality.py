"""Does whatever is parallelised compute what one device does? Random programs × plans, and zoo × methods × meshes.

Random pairs: programs drawn by `tests/generator`, with NaN, −0.0, infinities, clamped and negative positions, integers
that overflow, narrow floats, dims of no size, long chains on what costs nothing, loops without a batch, microbatches;
each under random plans, good or bad, those of methods and of clusters. Nearly all are compared to the bit.

Zoo: five train steps in float32 on abstract meshes, which make every contraction use all axes it can. The losses
must agree to 1e-5 and the parameters' difference must be below a thousandth of what the five steps moved them, as root
mean squares: Adam divides by the gradient's size, so that rounding alone turns a few of the smallest gradients round.

    python benchmarks/equality.py [MODEL …] [--jobs 2]          # the zoo
    python benchmarks/equality.py --pairs 5000 [--jobs 2]       # random pairs, on 8 virtual CPU devices
    python benchmarks/equality.py --pairs 500 --first 2000 --kept pairs.jsonl    # others; continued where it was ended
    python benchmarks/equality.py --pipelines 200 [--jobs 2]    # random train steps in random pipelines, in float64
"""

import argparse
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from tests.compiling import FLAGS

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {FLAGS}"  # most of the time goes into compiling
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MESHWRIGHT_MEASURE"] = "never"

import jax
import numpy as np
import random_pairs
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.planner.methods import Method

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "gpt-tiny": {},
    "llama-tiny": {},
    "llama-tiny scan": {"scan": True},
    "llama-tiny checkpoint": {"checkpoint": True},
    "llama-tiny scan checkpoint": {"scan": True, "checkpoint": True},
    **{name: {} for name in ("moe-tiny", "mixtral-tiny", "bert-tiny", "vit-tiny", "wide-resnet-tiny", "unet-tiny")},
}
METHODS = [
    mw.Auto(),
    mw.DataParallel(),
    *(mw.Zero(stage=stage) for stage in (1, 2, 3)),
    mw.TensorParallel(),
    mw.Manual({"state/params/*": jax.sharding.PartitionSpec()}),
]
MESHES = [(8,), (4, 2), (2, 2, 2)]
MICROBATCHES = [1, 2]
STEPS = 5
BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--pairs", type=int, default=0, help="how many random pairs to try instead of the zoo")
    parser.add_argument("--pipelines", type=int, default=0, help="how many random pipelines to try instead")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first random program")
    parser.add_argument("--kept", type=Path, help="a file that keeps outcomes of random pairs, so that runs continue")
    parser.add_argument("--method", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.pairs, options.pipelines, options.first) < 0 or options.jobs < 1:
        parser.error("--pairs, --pipelines and --first must be at least 0, and --jobs at least 1")
    for kind in ("pairs", "pipelines"):
        if count := getattr(options, kind):
            random_pairs.main(kind, options.first, count, options.jobs, options.kept)
            return
    if options.method is not None:
        for row in compared(options.models[0], METHODS[options.method]):
            print("\t".join(row), flush=True)
        return
    cases = [(model, method) for model in options.models for method in range(len(METHODS))]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = [row for found in pool.map(_in_a_process, cases) for row in found]
    header = ("model", "method", "mesh", "microbatches", "loss, relative", "parameters, ÷ moved", "")
    summary = ("in all", len(rows), "", "", f"differing: {sum(row[-1] != '' for row in rows)}", "", "")
    table("Equality", (__doc__ or "").split("\n")[0], header, [*rows, summary])


def _in_a_process(case: tuple[str, int]) -> list[list[str]]:
    """The rows of one model and method, from a process of its own."""
    command = [sys.executable, __file__, case[0], "--method", str(case[1])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [line.split("\t") for line in done.stdout.splitlines()]


def compared(model: str, method: Method) -> Iterator[tuple[str, ...]]:
    """Runs a model's steps on one device and under every plan of a method."""
    example = zoo.build(model.split()[0], batch=BATCH, dtype="float32", **MODELS[model])
    start, batches = example.init(0), [example.sample(step) for step in range(STEPS)]
    one, one_losses = _trained(example.train_step, example.init(0), batches)
    moved = _norm(jax.tree.map(np.subtract, one["params"], jax.tree.map(np.asarray, start["params"])))
    for shape, microbatches in itertools.product(MESHES, MICROBATCHES):
        mesh = mw.Mesh.abstract(shape, alpha=1, beta=(1, 0.1, 0.05)[: len(shape)])
        step = mw.parallelize(example.train_step, mesh=mesh, method=method, microbatches=microbatches)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where a batch norm keeps a batch whole, it says so
            many, losses = _trained(step, example.init(0), batches)
        loss = float(np.max(np.abs(losses / one_losses - 1)))
        apart = _norm(jax.tree.map(np.subtract, many["params"], one["params"])) / moved
        verdict = "" if loss <= 1e-5 and apart <= 1e-3 else "differs"
        name = "×".join(map(str, shape))
        yield model, method.name, name, str(microbatches), f"{loss:.1e}", f"{apart:.1e}", verdict


def _trained(step: Any, state: Any, batches: list[Any]) -> tuple[Any, np.ndarray]:
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return jax.tree.map(np.asarray, state), np.array(losses)


def _norm(tree: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree))))


if __name__ == "__main__":
    main()
