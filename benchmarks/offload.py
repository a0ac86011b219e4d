"""What does it take to keep the inputs of layers on the host? Steps of one GPU, as planned and as measured.

A train step of a GPT of a few layers is run with everything kept for the backward pass, with its layers computed again,
and with their inputs on the host besides, each in layers that run one after the other and in a loop over them.

    python benchmarks/offload.py                  # on one GPU; the chip is found
    python benchmarks/offload.py --layers 6
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax
from recompute import GIB, compiled_bytes, step_s
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.runtime.spmd import spmd


def row_of(policy: str, scan: bool, options: dict, steps: int) -> list[str]:
    """The planned and the measured step of a policy."""
    example = zoo.build("gpt3-1.3b", **options, **({"scan": True} if scan else {}))
    chip = "1x1 h200" if jax.default_backend() == "gpu" else "local"
    method = mw.Auto(recompute=policy, microbatches=1, memory_fraction=1.0)
    plan = mw.plan(example.train_step, example.state, example.batch, cluster=chip, method=method)
    program = spmd(plan, example.train_step)
    size = compiled_bytes(program.compile(example.state, example.batch))
    seconds = step_s(program, example, steps)
    return [
        "a loop" if scan else "one after the other",
        policy,
        f"{1000 * plan.step_s:.1f}",
        f"{1000 * seconds:.1f}",
        f"{plan.memory.peak_bytes / GIB:.2f}",
        f"{size / GIB:.2f}",
        f"{plan.memory.host_bytes / GIB:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    options = {"layers": given.layers, "batch": given.batch, "seq": 2048}
    rows = []
    for scan in (True, False):
        for policy in ("selective", "full", "offload"):
            rows.append(row_of(policy, scan, options, given.steps))
            print("| " + " | ".join(rows[-1]) + " |", flush=True)  # a run that is cut off leaves what it has measured
    header = ("layers", "policy", "planned (ms)", "measured (ms)", "planned GiB", "compiled GiB", "GiB on the host")
    table("Offload", __doc__.split("\n")[0], header, rows)


if __name__ == "__main__":
    main()
