"""Do pipelines compute what one device computes, and what do their instructions cost?

Each row trains a model for some steps in stages on virtual CPU devices, in float64 throughout, and compares all losses
and parameters with one device: `difference` is the largest of all differences. `programs` are those of all stages, and
how many XLA compiled: equal stages are compiled once. `instructions` are the calls of a step (a pass, a transfer, a
round of the update); `host µs` is the median time that the calling thread computes until such a call returns, of stages
with one device each, which do not wait for their results. `step` is the time of a step over that of a step in which
every instruction is waited for before the next; `outside` is the part of the latter that is outside the instructions:
arguments are checked and placed, results put together, arrays freed. `arrays` has the bytes of the arrays that a device
of each stage holds at most between two programs, over the plan's, and `peak` those with the temporaries of programs
that XLA compiles without optimisation here, as `plan.verify()` finds them. XLA's CPU backend stores more than its GPU
backend: transposed copies for convolutions, index arrays for the gradient of a maximum over windows. The rows of
`gpt-tiny` in float32 are verified only, compiled as usual: 1F1B holds fewer microbatches than GPipe.

    python benchmarks/pipelines.py [--only llama] [--steps 5]
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
from tests.compiling import FLAGS, QUICK

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {FLAGS}"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MESHWRIGHT_MEASURE"] = "never"
os.environ["MESHWRIGHT_PROGRESS"] = "0"

import jax
import jax.numpy as jnp
import numpy as np
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.runtime.checking.verify_stages import verify_program
from meshwright.units import format_bytes
from tests.frameworks.pipelined import FRAMEWORKS

BATCH = 8
ROWS: tuple[tuple[str, dict[str, Any], mw.ThreeD], ...] = (
    ("gpt-tiny", {"layers": 2}, mw.ThreeD(pipeline=2, tensor=2, microbatch=4)),
    ("gpt-tiny", {"layers": 8}, mw.ThreeD(pipeline=8, microbatch=1, checkpoint="full")),
    ("gpt-tiny", {"layers": 4, "scan": True}, mw.ThreeD(pipeline=4, microbatch=2, schedule="gpipe")),
    ("llama-tiny", {"layers": 3}, mw.ThreeD(pipeline=3, microbatch=2, schedule="gpipe")),
    ("llama-tiny", {"layers": 2, "scan": True, "checkpoint": True}, mw.ThreeD(pipeline=2, data=2, microbatch=2)),
    ("llama-tiny", {"layers": 5, "scan": True}, mw.ThreeD(pipeline=3, microbatch=2)),  # 2, 2 and 1 layers and the head
    ("gpt-tiny", {"layers": 6, "scan": True}, mw.ThreeD(pipeline=2, microbatch=2, interleave=2, checkpoint="full")),
    ("qwen-tiny", {"layers": 4, "tied": True}, mw.ThreeD(pipeline=2, microbatch=2, interleave=2)),
    ("bert-tiny", {"layers": 4}, mw.ThreeD(pipeline=4, microbatch=2, schedule="zb-h1")),
    ("moe-tiny", {"layers": 2, "batch": 16, "seq": 16}, mw.ThreeD(pipeline=2, microbatch=4, checkpoint="selective")),
    ("vit-tiny", {"layers": 2}, mw.ThreeD(pipeline=2, data=2, tensor=2, microbatch=2)),
    ("wide-resnet-tiny", {}, mw.ThreeD(pipeline=2, microbatch=BATCH)),  # batch norm: one microbatch
    ("Flax linen", {}, mw.ThreeD(pipeline=2, microbatch=4)),
    ("Flax nnx", {}, mw.ThreeD(pipeline=3, microbatch=4, schedule="zb-h1")),
    ("Equinox", {}, mw.ThreeD(pipeline=4, microbatch=4, schedule="gpipe")),
    ("Haiku", {}, mw.ThreeD(pipeline=2, data=2, microbatch=4)),
)
USUAL = {name: not value if isinstance(value, bool) else 2 for name, value in QUICK.items()}  # XLA's defaults
MEMORY = {"layers": 4, "seq": 64, "hidden": 128, "batch": 16}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="rows whose models have this in their names")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    rows: list[Sequence[object]] = []
    for row in found_rows(options):
        rows.append(row)
        print("| " + " | ".join(map(str, row)) + " |", flush=True)  # a run that is cut short keeps what it printed
    figures = (
        "difference",
        "programs",
        "instructions",
        "host µs",
        "step",
        "outside",
        "arrays ÷ planned",
        "peak ÷ planned",
    )
    load = f"Load of the machine in the last 15 minutes: {os.getloadavg()[2]:.0f} on {os.cpu_count()} cores."
    question = f"{(__doc__ or '').split(chr(10) * 2 + '    python')[0]}\n\n{load}"
    table("Pipelines", question, ("model", "recipe", *figures), rows)


def found_rows(options: Any) -> Iterator[Sequence[object]]:
    """The rows of the table, one by one."""
    for name, kinds, recipe in ROWS:
        if options.only in name:
            yield from compared(name, kinds, recipe, options)
    if options.only in "gpt-tiny float32":
        yield from memory_rows()


def compared(name: str, kinds: dict[str, Any], recipe: mw.ThreeD, options: Any) -> Iterator[Sequence[object]]:
    """The row of a model and a recipe."""
    began = time.perf_counter()
    words = [name, *(key for key in kinds if kinds[key] is True)]
    try:
        with jax.enable_x64(True):
            found = measured(*model_of(name, kinds), recipe, options.steps)
        yield (" ".join(words), said(recipe), *found)
    except mw.ShardingError as error:
        yield (" ".join(words), said(recipe), f"refused: {str(error)[:90]}…", *[""] * 7)
    print(f"{name}, {said(recipe)}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


def said(recipe: mw.ThreeD) -> str:
    parts = [f"{recipe.pipeline} stages", recipe.schedule]
    parts += [
        f"{word} {getattr(recipe, word)}" for word in ("data", "tensor", "interleave") if getattr(recipe, word) > 1
    ]
    return ", ".join([*parts, recipe.checkpoint] if recipe.checkpoint != "none" else parts)


def model_of(name: str, kinds: dict[str, Any]) -> tuple[Callable, Callable, Any]:
    """The initialiser, the step and a batch, in float64."""
    if name in FRAMEWORKS:
        return FRAMEWORKS[name](jnp.float64)
    sizes = {"batch": BATCH} if name.startswith(("vit", "wide")) else {"batch": BATCH, "seq": 8}
    model = zoo.build(name, dtype="float64", **(sizes | kinds))
    plain = getattr(model.train_step, "__wrapped__", model.train_step)

    def step(state: Any, batch: Any) -> Any:
        with mock.patch.object(jnp, "float32", jnp.float64):  # softmax, norms and loss are computed in float32
            return plain(state, batch)

    batch = jax.tree.map(wide, model.sample(0))
    return lambda key: jax.tree.map(wide, model.init(key)), step, batch


def wide(x: Any) -> Any:
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def measured(init: Callable, step: Callable, batch: Any, recipe: mw.ThreeD, steps: int) -> tuple[str, ...]:
    devices = recipe.data * recipe.tensor * recipe.pipeline
    run = mw.parallelize(step, cluster=f"1x{devices} cpu", method=recipe)
    alone, one = init(jax.random.key(0)), jax.jit(step)
    state, worst = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, alone), 0.0
    arrays = [i for i, x in enumerate(jax.tree.leaves(alone)) if isinstance(x, jax.Array)]
    one = step if len(arrays) < len(jax.tree.leaves(alone)) else one  # JAX compiles no functions among the leaves
    for _ in range(steps):
        alone, expected = one(alone, batch)
        state, loss = run(state, batch)
        worst = max(worst, difference((alone, expected), (state, loss)))
    engine = run.recent.engine
    host, ratio, outside = timed(run, state, batch)
    found = verify_program(run.recent)
    arrays, peak = (" ".join(f"{getattr(s, name).ratio:.2f}" for s in found.stages) for name in ("arrays", "memory"))
    compiled = len({lowered.jitted.lower(*lowered.types).as_text() for lowered in engine.lowered.values()})
    host_text = f"{host:.0f}" if devices == recipe.pipeline else "waits"
    programs = f"{len(engine.lowered)}, {compiled} compiled"
    return f"{worst:.1e}", programs, str(len(engine.bound)), host_text, f"{ratio:.2f}", f"{outside:.0%}", arrays, peak


def difference(one: Any, other: Any) -> float:
    """The largest difference of two trees."""
    found = 0.0
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if isinstance(a, jax.Array):
            found = max(found, float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max(initial=0.0)))
    return found


def timed(run: Any, state: Any, batch: Any) -> tuple[float, float, float]:
    """Median host time of an instruction in µs, the time of a step over that of one whose instructions are waited for,
    and the part of the latter that is outside the instructions."""
    calls: list[float] = []
    bound = run.recent.engine.bound

    def watched(call: Callable, waits: bool) -> Callable:
        def timing(*args: Any) -> Any:
            clock = time.perf_counter if waits else time.thread_time
            begin = clock()
            made = call(*args)
            if waits:
                jax.block_until_ready(made)
            calls.append(clock() - begin)
            return made

        return timing

    def step(waits: bool | None) -> float:
        nonlocal state
        engine = run.recent.engine
        engine.bound = bound if waits is None else [replace(one, run=watched(one.run, waits)) for one in bound]
        begin = time.perf_counter()
        state, loss = run(state, batch)
        jax.block_until_ready((jax.tree.leaves(state), loss))
        return time.perf_counter() - begin

    for _ in range(5):
        step(waits=False)
    host = median(calls) * 1e6
    waited, inside = [], []
    for _ in range(9):
        calls.clear()
        waited.append(step(waits=True))
        inside.append(sum(calls))
    plain = median(step(waits=None) for _ in range(9))
    return host, plain / median(waited), 1 - median(inside) / median(waited)


def memory_rows() -> Iterator[Sequence[object]]:
    """GPipe and 1F1B, verified in float32."""
    model = zoo.build("gpt-tiny", dtype="float32", **MEMORY)
    for schedule in ("gpipe", "1f1b"):
        recipe = mw.ThreeD(pipeline=4, microbatch=2, schedule=schedule)
        plan = mw.plan(model.train_step, model.state, model.batch, cluster="1x4 cpu", method=recipe)
        found = plan.verify(compiler_options=USUAL)
        pairs = [[s.arrays for s in found.stages], [s.memory for s in found.stages]]
        shares = [" ".join(f"{pair.ratio:.2f} ({format_bytes(pair.compiled)})" for pair in row) for row in pairs]
        yield ("gpt-tiny float32", said(recipe), *[""] * 6, *shares)


if __name__ == "__main__":
    main()
