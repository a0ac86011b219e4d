"""Do pipelines compute what one device computes, and what do their instructions cost?

Each row trains a model of the zoo for some steps in stages on virtual CPU devices, in float64, and compares all losses
and parameters with one device. `instructions` are the calls of a step (a pass, a transfer, a round of the update);
`host µs` is the median time until such a call returns, of stages with one device each, which do not wait for their
results. `step` is the time of a whole step over the times of its instructions, each waited for, one after another. The
last column has the bytes of the arrays that a stage's first device holds, at most, between any two instructions, over
the plan's peak bytes, which count temporaries, too.

    python benchmarks/pipelines.py [--models gpt-tiny,llama-tiny] [--steps 5]
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
from tests.compiling import FLAGS

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {FLAGS}"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MESHWRIGHT_MEASURE"] = "never"
os.environ["MESHWRIGHT_PROGRESS"] = "0"

import jax
import numpy as np
from report import table

import meshwright as mw
from meshwright import zoo

MODELS = {
    "gpt-tiny": {"seq": 16, "layers": 8},
    "gpt-tiny scan": {"seq": 16, "layers": 8, "scan": True},
    "llama-tiny": {"seq": 16, "layers": 8},
    "llama-tiny scan": {"seq": 16, "layers": 8, "scan": True, "checkpoint": True},
    "bert-tiny": {"seq": 16, "layers": 8},
    "moe-tiny": {"seq": 16, "layers": 8},
    "mixtral-tiny": {"seq": 16, "layers": 8},
    "vit-tiny": {"layers": 8},
    "unet-tiny": {},
    "wide-resnet-tiny": {},
}
RECIPES = (
    mw.ThreeD(pipeline=2, tensor=2, microbatch=4),
    mw.ThreeD(pipeline=3, microbatch=4, schedule="gpipe"),
    mw.ThreeD(pipeline=4, data=2, microbatch=2, schedule="zb-h1"),
    mw.ThreeD(pipeline=2, microbatch=2, interleave=2, checkpoint="selective"),
    mw.ThreeD(pipeline=8, microbatch=2, checkpoint="full"),
)
BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    with jax.enable_x64(True):
        rows = [row for name in options.models.split(",") for row in compared(name, options.steps)]
    header = ("model", "recipe", "largest relative difference", "instructions", "host µs", "step", "peak ÷ planned")
    table("Pipelines", (__doc__ or "").split("\n\n    python")[0], header, rows)


def compared(name: str, steps: int) -> Iterator[Sequence[object]]:
    """A row for each recipe that the model allows."""
    options = {"batch": BATCH, "dtype": "float64", **MODELS[name]}
    model = zoo.build(name.split()[0], **options)
    batch, step = model.sample(0), model.train_step.__wrapped__
    for recipe in RECIPES:
        method = recipe
        if name.startswith("wide-resnet"):  # batch norm: the batch is one microbatch
            method = mw.ThreeD(pipeline=recipe.pipeline, tensor=recipe.tensor, microbatch=BATCH)
        words = f"{method.name} {method.schedule} {method.interleave} {method.checkpoint}"
        try:
            yield (name, words, *measured(model, step, batch, method, steps))
        except mw.ShardingError as error:
            yield (name, words, f"refused: {str(error)[:90]}…", "", "", "", "")
        print(f"{name}: {words} done", file=sys.stderr, flush=True)


def measured(model: Any, step: Any, batch: Any, method: mw.ThreeD, steps: int) -> tuple[str, ...]:
    devices = method.data * method.tensor * method.pipeline
    run = mw.parallelize(step, cluster=f"1x{devices} cpu", method=method)
    state = mw.create_state(model.init, jax.random.key(0), like=run, example=(batch,))
    alone, one = jax.tree.map(np.asarray, state), jax.jit(step)
    worst = 0.0
    for _ in range(steps):
        alone, expected = one(alone, batch)
        state, loss = run(state, batch)
        worst = max(worst, difference((alone["params"], expected), (state["params"], loss)))
    engine = run.recent.engine
    host, ratio, peaks = timed(run, state, batch)
    planned = [stage.peak_bytes for stage in run.last_plan.stages]
    shares = " ".join(f"{peak / plan:.2f}" for peak, plan in zip(peaks, planned, strict=True))
    host_text = f"{host:.0f}" if devices == method.pipeline else "waits"
    return f"{worst:.1e}", str(len(engine.bound)), host_text, f"{ratio:.2f}", shares


def difference(one: Any, other: Any) -> float:
    """The largest difference of two trees, relative to the largest number of each leaf."""
    found = 0.0
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a, float), np.asarray(b, float)
        found = max(found, float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-12)))
    return found


def timed(run: Any, state: Any, batch: Any) -> tuple[float, float, list[int]]:
    """Median host time of an instruction in µs, a step over its instructions one by one, and the stages' peak bytes."""
    engine, program = run.recent.engine, run.recent
    first = [own.mesh.devices.flat[0] for own in engine.devices]
    calls: list[float] = []
    peaks = [0] * len(first)

    def watched(leaves: Sequence[Any], *, waits: bool) -> list[Any]:
        arrays: list[Any] = [None] * len(engine._slots)
        for slot, index in engine._given:
            arrays[slot] = index
        for slot, place, leaf in engine._entering:
            arrays[slot] = place(leaves[leaf])
        for one in engine.bound:
            begin = time.perf_counter()
            made = one.run(*[arrays[i] for i in one.reads])
            if waits:
                jax.block_until_ready(made)
            calls.append(time.perf_counter() - begin)
            for slot, array in zip(one.fills, made, strict=True):
                arrays[slot] = array
            if waits:
                note(arrays)
            for slot in one.drops:
                arrays[slot] = None
        return [take(leaves, arrays) for take, _ in engine._leaving]

    def note(arrays: Sequence[Any]) -> None:
        for stage, device in enumerate(first):
            held = {}
            for array in arrays:
                if isinstance(array, jax.Array) and not array.is_deleted():
                    for shard in array.addressable_shards:
                        if shard.device == device:
                            held[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
            peaks[stage] = max(peaks[stage], sum(held.values()))

    def step(waits: bool) -> float:
        nonlocal state
        leaves = jax.tree.leaves((state, batch))
        begin = time.perf_counter()
        outs = program._joined(watched(program._pieces(leaves), waits=waits))
        jax.block_until_ready(outs)
        took = time.perf_counter() - begin
        state = jax.tree.unflatten(jax.tree.structure((state, 0)), outs)[0]
        return took

    step(waits=False)
    calls.clear()
    for _ in range(5):
        step(waits=False)
    host = median(calls) * 1e6
    calls.clear()
    step(waits=True)
    back_to_back = sum(calls)
    plain = median(step(waits=False) for _ in range(5))
    return host, plain / back_to_back, peaks


if __name__ == "__main__":
    main()
