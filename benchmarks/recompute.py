"""Does Meshwright recompute less than the stock policies of JAX? Tokens a second of one GPU that is short of memory.

For each model 0.7 and 0.5 of the memory that a step takes without recomputation are allowed. Of the stock
`jax.checkpoint_policies` around each layer those that fit are timed, and so is the plan that `mw.Auto` finds under the
same limit, with its peak memory as compiled against what was planned.

    python benchmarks/recompute.py                  # all models
    python benchmarks/recompute.py gpt vit --steps 8
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

import jax
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.runtime.spmd import spmd
from meshwright.zoo import layers

GIB = 2**30
MODELS = {
    "gpt": ("gpt3-1.3b", {"layers": 8, "batch": 16, "seq": 2048}),
    "llama": ("llama3-8b", {"layers": 8, "batch": 8, "seq": 4096, "hidden": 2048, "ffn": 8192, "vocab": 32000}),
    "vit": ("vit-l16", {"layers": 12, "batch": 512}),
    "mixtral": ("mixtral-8x7b", {"layers": 4, "batch": 16, "seq": 2048, "hidden": 1024, "ffn": 3584, "heads": 16}),
}
STOCK = {
    "everything": None,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
}
FRACTIONS = (0.7, 0.5)
"""Parts of the memory that no recomputation needs."""


def compiled_bytes(compiled: jax.stages.Compiled) -> int:
    memory = compiled.memory_analysis()
    arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes
    return arguments + results - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def stock_step(name: str, options: dict, policy: object) -> jax.stages.Compiled:
    """The train step with a stock policy around each of its layers, compiled."""
    jax.clear_caches()  # a layer is traced once for all policies otherwise
    with patch.object(layers, "_keep_products", policy):
        example = zoo.build(name, **options, checkpoint="none" if policy is None else "selective")
        return jax.jit(example.train_step, donate_argnums=0).lower(example.state, example.batch).compile()


def step_s(run, example: zoo.Example, steps: int) -> float:
    """Seconds of one step, the first two left out."""
    batch = jax.device_put(example.sample(jax.random.key(1)))
    state = jax.jit(example.init)(jax.random.key(0))
    for _ in range(2):
        state, loss = run(state, batch)
    jax.block_until_ready(loss)
    started = time.perf_counter()
    for _ in range(steps):
        state, loss = run(state, batch)
    jax.block_until_ready(loss)
    return (time.perf_counter() - started) / steps


def rows_of(model: str, steps: int) -> Iterator[list[str]]:
    """The rows of one model, each as it is measured: its stock policies, and a plan for each limit."""
    name, options = MODELS[model]
    example, stock = zoo.build(name, **options), {}
    whole = mw.cluster("1x1 h200").memory_bytes
    for policy_name, policy in STOCK.items():
        compiled = stock_step(name, options, policy)
        size = compiled_bytes(compiled)
        seconds = step_s(compiled, example, steps) if size < whole else None
        stock[policy_name] = size, seconds
        shown = "does not fit" if seconds is None else f"{1000 * seconds:.1f}"
        yield [model, "stock", policy_name, shown, f"{size / GIB:.2f}", "", ""]
    need = stock["everything"][0]
    for fraction in FRACTIONS:
        limit = fraction * need
        fitting = {key: s for key, (size, s) in stock.items() if size <= limit and s is not None}
        best = min(fitting, key=lambda key: fitting[key]) if fitting else None
        started = time.perf_counter()
        try:
            plan = mw.plan(
                example.train_step,
                example.state,
                example.batch,
                cluster="1x1 h200",
                method=mw.Auto(memory_fraction=limit / whole),
            )
        except mw.DoesNotFit as error:
            yield [model, f"{fraction} of memory", "no plan", "", "", "", str(error)[:80]]
            continue
        planning_s = time.perf_counter() - started
        program = spmd(plan, example.train_step)
        size = compiled_bytes(program.compile(example.state, example.batch))
        seconds = step_s(program, example, steps)
        against = "nothing fits" if best is None else f"{fitting[best] / seconds:.3f}× {best}"
        what = f"{plan.recompute}, {plan.microbatches} microbatches ({planning_s:.0f} s)"
        peak = f"{size / plan.memory.peak_bytes:.3f} of planned; {size / limit:.3f} of the limit"
        yield [model, f"{fraction} of memory", what, f"{1000 * seconds:.1f}", f"{size / GIB:.2f}", against, peak]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="gpt, llama, vit, mixtral; all by default")
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    header = ("model", "limit", "policy or plan", "step (ms)", "GiB", "against the best stock", "memory")
    rows = []
    for model in given.models or MODELS:
        for row in rows_of(model, given.steps):
            print("| " + " | ".join(row) + " |", flush=True)  # a run that is cut off leaves what it has measured
            rows.append(row)
    table("Recompute", __doc__.split("\n")[0], header, rows)


if __name__ == "__main__":
    main()
