"""Do the programs of stages, compiled for clusters of H200s, send, compute and hold what was planned?

It takes one H200, which compiles for clusters that are not there. Each row is a stage, with what was compiled over what
was planned; bytes are those of its collectives and those that it sends to other stages.

    python benchmarks/stage_programs.py
"""

import faulthandler
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
from jax.experimental import topologies
from report import table

import meshwright as mw
from meshwright import zoo

SHAPE: dict[str, Any] = {"batch": 16, "seq": 2048, "layers": 4}
ROWS = (
    ("llama2-7b", 1, mw.ThreeD(data=2, tensor=2, pipeline=2, microbatch=2)),
    ("llama2-7b", 2, mw.ThreeD(tensor=8, pipeline=2, microbatch=2)),
    ("gpt3-6.7b", 2, mw.ThreeD(data=2, tensor=4, pipeline=2, microbatch=2)),
)


def main() -> None:
    faulthandler.enable()  # XLA compiles for devices that are not there: a crash says where
    if jax.default_backend() != "gpu":
        print("SKIPPED: this machine has no GPU, which compiles for others")
        return
    header = ("model", "cluster", "recipe", "stage", "bytes", "memory", "flops")
    rows = [row for model, hosts, recipe in ROWS for row in compiled(model, hosts, recipe)]
    table("Stage programs", (__doc__ or "").split("\n    python")[0], header, rows)


def compiled(model: str, hosts: int, recipe: mw.ThreeD) -> Iterator[tuple[object, ...]]:
    """A row for each stage: compiled ÷ planned."""
    example = zoo.build(model, **SHAPE)
    cluster = f"{hosts}x8 h200"
    print(f"{model} on {cluster}, {recipe.name}: planning", flush=True)
    plan = mw.plan(example.train_step, example.state, example.batch, cluster=cluster, method=recipe)
    devices = topologies.get_topology_desc("h200", "cuda", topology=f"1x{hosts}x8").devices
    print("compiling", flush=True)
    found = plan.verify(devices=devices)
    print(found, flush=True)
    for number, stage in enumerate(found.stages):
        figures = (stage.bytes.ratio, stage.memory.ratio, stage.flops.ratio)
        yield (model, cluster, recipe.name, number, *(f"{ratio:.3f}" for ratio in figures))


if __name__ == "__main__":
    main()
