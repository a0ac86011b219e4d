"""Is the predicted time of a step that of a real device? One accelerator, models that fit it.

Each train step is planned for one device of the chip at hand, by the catalogue's figures and by what `mw.cluster`
measured on it, and timed as plain `jax.jit` runs it. Asked for: within 15%.

    python benchmarks/steptime.py
"""

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
from report import table

import meshwright as mw
from meshwright import zoo

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("gpt3-1.3b", {"batch": 4, "seq": 2048}),
    ("gpt3-1.3b", {"batch": 8, "seq": 1024}),
    ("gpt3-1.3b", {"batch": 8, "seq": 2048, "checkpoint": True}),
    ("gpt3-1.3b", {"batch": 8, "seq": 2048, "checkpoint": True, "scan": True}),
    ("llama2-7b", {"batch": 2, "seq": 4096, "layers": 4}),
    ("llama2-7b", {"batch": 8, "seq": 2048, "layers": 4}),
    ("llama2-7b", {"batch": 8, "seq": 2048, "layers": 4, "checkpoint": True}),
    ("llama2-7b", {"batch": 8, "seq": 2048, "layers": 4, "scan": True}),
]
STEPS = 10


def main() -> None:
    rows = []
    for model, options in MODELS:
        example = zoo.build(model, **options)
        data_sheet = mw.plan(example.train_step, example.state, example.batch, cluster="1x1 h200")
        measured_chip = mw.plan(example.train_step, example.state, example.batch, cluster="local")
        taken = measured(example)
        rows.append(
            (
                f"{model} {' '.join(f'{k}={v}' for k, v in options.items())}",
                f"{1e3 * taken:.1f} ms",
                f"{data_sheet.flops / taken / 1e12:.0f}",
                *(f"{1e3 * p.step_s:.1f} ms ({p.step_s / taken - 1:+.0%})" for p in (data_sheet, measured_chip)),
            )
        )
        print(rows[-1], flush=True)
    header = ("program", "measured", "TFLOP/s", "planned from the catalogue", "planned from measured figures")
    table("Step time", (__doc__ or "").split("\n")[0], header, rows)


def measured(example: zoo.Example) -> float:
    """Seconds of one step, the median over several."""
    state = jax.jit(example.init)(jax.random.key(0))
    batch = jax.jit(example.sample)(jax.random.key(1))
    times = []
    for _ in range(STEPS + 2):
        started = time.perf_counter()
        state, loss = example.train_step(state, batch)
        loss.block_until_ready()
        times.append(time.perf_counter() - started)
    return median(times[2:])


if __name__ == "__main__":
    main()
