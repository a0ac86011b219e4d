"""Are programs that people train planned from a laptop, and do their plans predict what was reached?

Three parts, each a table of its own: published steps planned as their authors split them and simulated, beside the
recipes' predictions; Llama-3.1-8B planned for 128 H100s; and steps of a few layers on one GPU, planned, simulated and
measured. A part whose machine is not there is left out.

    python benchmarks/programs.py              # the first two; MESHWRIGHT_DATA names the folder of published.csv
    python benchmarks/programs.py --gpu        # the third, on one H200
"""

import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.validation.plan_table import PlanValidation
from meshwright.validation.replay import read_rows
from meshwright.validation.replay_plans import PlanReplay, replay_plans

DATA = Path(os.environ.get("MESHWRIGHT_DATA", Path(__file__).parents[2] / "shared" / "data"))
GPU_MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama2-7b", {"batch": 4, "seq": 4096, "layers": 2, "attention": "fused"}),
    ("llama2-7b", {"batch": 4, "seq": 4096, "layers": 2, "attention": "plain"}),
    ("llama3.1-8b", {"batch": 2, "seq": 8192, "layers": 2, "attention": "fused"}),
    ("gpt2-774m", {"batch": 16, "seq": 1024, "layers": 3, "attention": "fused"}),
    ("bert-large", {"batch": 64, "seq": 512, "layers": 3, "attention": "fused"}),
    ("vit-l16", {"batch": 256, "layers": 3, "attention": "plain"}),
    ("mixtral-8x7b", {"batch": 2, "seq": 4096, "layers": 1, "attention": "fused"}),
    ("gshard-moe-380m", {"batch": 16, "seq": 1024, "layers": 2, "attention": "fused"}),
]
STEPS = 20


def published() -> None:
    """Every row that can be expressed: the plan's step, the recipe's and the published one."""
    replayed, given = [], read_rows(DATA / "published.csv")
    for number, one in enumerate(replay_plans(given), 1):
        print(f"{number} of {len(given)}  {one}", flush=True)  # a run that is cut keeps what it found
        replayed.append(one)
    found = PlanValidation(tuple(replayed))
    rows = [_row(one) for one in found.expressed]
    rows += [
        (
            f"**{t.name}**",
            f"{t.count} rows",
            "",
            "",
            "",
            "",
            f"{t.value:.1%}",
            f"{'≥' if t.least else '≤'} {t.bound:.0%}",
        )
        for t in found.targets
        if t.value is not None
    ]
    header = ("row", "model", "method", "plan s", "recipe s", "published s", "plan's error", "recipe's")
    table("Programs", "Do simulated plans reach what was published for their method?", header, rows)
    print(f"{len(found.rows) - len(found.expressed)} rows have no plan: meshwright validate --plans says why")


def _row(one: PlanReplay) -> tuple[str, ...]:
    steps = (one.step_s, one.recipe.predicted_step_s, one.recipe.published_step_s)
    errors = (one.error, one.recipe.error)
    return (
        one.recipe.row.id,
        one.recipe.row.text("model"),
        one.method,
        *("" if step is None else f"{step:.4g}" for step in steps),
        *("" if error is None else f"{error:+.1%}" for error in errors),
    )


def laptop() -> None:
    """Llama-3.1-8B for 128 H100s, with selective checkpoints, on this machine."""
    rows = []
    for method in ("auto", "zero3"):
        started, used = time.perf_counter(), time.process_time()
        example = zoo.build("llama3.1-8b", batch=256, checkpoint="selective")
        plan = mw.plan(example.train_step, example.state, example.batch, cluster="16x8 h100", method=method)
        taken = f"{time.perf_counter() - started:.1f} s ({time.process_time() - used:.1f} s of CPU)"
        step = plan.simulate()
        tokens = step.tokens_per_s / plan.mesh.num_devices
        memory = f"{plan.memory.peak_bytes / 2**30:.1f} GiB"
        rows.append((method, taken, f"{step.step_s:.3f} s", f"{step.mfu:.3f}", f"{tokens:,.0f}", memory))
    header = ("method", "build, trace and plan", "simulated step", "MFU", "tokens a second and GPU", "memory")
    table("Programs laptop", "Llama-3.1-8B on 16x8 h100, batch 256, planned here without CUDA", header, rows)


def gpu() -> None:
    """Steps on the GPU at hand, against the plan and its simulation."""
    rows = []
    for model, options in GPU_MODELS:
        example = zoo.build(model, **options)
        plan = mw.plan(example.train_step, example.state, example.batch, cluster="1x1 h200")
        measured_s = measured(example)
        predicted = (plan.step_s, plan.simulate().step_s)
        name = f"{model} {' '.join(f'{key}={value}' for key, value in options.items())}"
        cells = (f"{1e3 * one:.1f} ms ({one / measured_s - 1:+.1%})" for one in predicted)
        rows.append((name, f"{1e3 * measured_s:.1f} ms", *cells))
        print(rows[-1], flush=True)
    table(
        "Programs H200",
        "One GPU: planned and simulated against measured",
        ("program", "measured", "planned", "simulated"),
        rows,
    )


def measured(example: zoo.Example) -> float:
    """Seconds of one step among steps that follow each other, the median of three runs."""
    import jax

    state, batch = jax.jit(example.init)(jax.random.key(0)), jax.jit(example.sample)(jax.random.key(1))
    times = []
    for _run in range(4):
        started = time.perf_counter()
        for _ in range(STEPS):
            state, loss = example.train_step(state, batch)
        loss.block_until_ready()
        times.append((time.perf_counter() - started) / STEPS)
    return median(times[1:])


if __name__ == "__main__":
    if "--gpu" in sys.argv:
        gpu()
    else:
        laptop()
        published()
