"""A plan for a cluster you do not have, and a plan that runs here: `make demo`.

First Llama-2-13B is planned for 50 hosts of 4 A100-40GB, without one of them. Then a small GPT is planned for eight
virtual CPU devices and trained for a few steps on them and on one device, to show that the numbers are the same.
"""

import os
import sys

# JAX reads this once, when it is imported.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import time

from rich.console import Console
from rich.table import Table

import meshwright as mw
from meshwright import zoo
from meshwright.explain.show.plan_text import plan_view
from meshwright.runtime.spmd import spmd

STEPS = 4
ROUNDING = 1e-5  # relative: float32 sums in another order differ by less

console = Console(width=118) if not sys.stdout.isatty() else Console()


def plan_for_a_cluster() -> None:
    console.rule("Llama-2-13B for 50 hosts of 4 A100-40GB")
    example = zoo.build("llama2-13b", batch=200, seq=2048, checkpoint=True)
    started = time.perf_counter()
    with console.status("planning") as status:
        plan = mw.plan(
            example.train_step, example.state, example.batch, cluster="50x4 a100-40gb", on_progress=status.update
        )
    console.print(plan_view(plan))
    console.print(f"\nplanned in {time.perf_counter() - started:.1f} s, tracing and all mesh views included\n")


def plan_and_run_here() -> bool:
    """Trains a small GPT as planned and on one device; returns whether the losses are equal to rounding."""
    console.rule("A small GPT on 8 virtual CPU devices")
    example = zoo.build("gpt-tiny", batch=16, seq=64, hidden=128, dtype="float32")
    plan = mw.plan(example.train_step, example.state, example.batch, cluster="local")
    console.print("\n".join(str(plan).splitlines()[:4]), highlight=False)

    planned_step = spmd(plan, example.train_step)
    planned_state, plain_state = example.init(0), example.init(0)
    table = Table("step", "loss as planned", "loss on one device", "difference", title="training", title_justify="left")
    worst = 0.0
    for step in range(STEPS):
        batch = example.sample(step)
        with console.status(f"step {step}"):
            planned_state, planned_loss = planned_step(planned_state, batch)
            plain_state, plain_loss = example.train_step(plain_state, batch)
        difference = abs(float(planned_loss) - float(plain_loss))
        worst = max(worst, difference / abs(float(plain_loss)))
        table.add_row(str(step), f"{planned_loss:.7f}", f"{plain_loss:.7f}", f"{difference:.1e}")
    console.print(table)
    equal = worst <= ROUNDING
    verdict = "equal to rounding" if equal else "NOT EQUAL"
    console.print(f"losses {verdict}: they differ by at most {worst:.1e} of their size ({ROUNDING:.0e} allowed)")
    return equal


if __name__ == "__main__":
    plan_for_a_cluster()
    sys.exit(0 if plan_and_run_here() else 1)
