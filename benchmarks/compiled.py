"""Does XLA do what was planned? Predicted against compiled: bytes of each kind of collective, and memory.

On a machine without accelerators the programs are compiled for 8 virtual CPU devices, whose backend writes a
reduce-scatter as an all-reduce and a slice. `--topology h200` compiles for a host of 8 GPUs where only one of the kind
is there.

Memory is what XLA allocates: arguments, temporaries and results that take no argument's place. It is packed, so it can
be more than what is ever live. XLA's CPU backend is kept from dropping barriers, which would undo checkpoints, and is
given float32, since it widens bfloat16.
"""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
TOPOLOGY = sys.argv[sys.argv.index("--topology") + 1] if "--topology" in sys.argv else None
if TOPOLOGY is None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.runtime.compiled import collectives_of
from meshwright.runtime.spmd import spmd

SMALL = [
    ("mlp", {"batch": 32}, (8,)),
    ("gpt-tiny", {"batch": 16}, (2, 4)),
    ("llama-tiny", {"batch": 16, "scan": True}, (2, 4)),
    ("llama-tiny", {"batch": 16, "checkpoint": True}, (8,)),
    ("moe-tiny", {"batch": 16}, (2, 4)),
]
LARGE = [
    ("llama2-7b", {"batch": 16, "seq": 2048, "layers": 4}, (8,)),
    ("llama2-7b", {"batch": 16, "seq": 2048, "layers": 4}, (2, 4)),
    ("llama2-7b", {"batch": 16, "seq": 2048, "layers": 4, "checkpoint": True}, (8,)),
    ("llama2-7b", {"batch": 64, "seq": 2048, "layers": 4, "checkpoint": True}, (2, 4)),
    ("llama2-7b", {"batch": 16, "seq": 2048, "layers": 4, "scan": True}, (8,)),
    ("llama2-7b", {"batch": 16, "seq": 2048, "layers": 4, "scan": True, "checkpoint": True}, (8,)),
    ("gpt3-1.3b", {"batch": 16, "seq": 1024, "layers": 4}, (2, 4)),
    ("mixtral-8x7b", {"batch": 8, "seq": 2048, "layers": 2}, (8,)),
]
OPTIONS = {} if TOPOLOGY else {"xla_disable_hlo_passes": "cse_barrier_expander"}
DTYPE = "bfloat16" if TOPOLOGY else "float32"


def devices() -> list[jax.Device]:
    if TOPOLOGY is None:
        return jax.devices()
    from jax.experimental import topologies

    return topologies.get_topology_desc(TOPOLOGY, "cuda", topology="1x1x8").devices


def megabytes(sent: Counter[str]) -> str:
    return ", ".join(f"{kind} {size / 1e6:.2f}" for kind, size in sorted(sent.items()) if size) or "none"


def allocated(compiled: Any) -> int:
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + memory.temp_size_in_bytes + results)


def main() -> None:
    rows = []
    for model, options, shape in LARGE if TOPOLOGY else SMALL:
        example = zoo.build(model, dtype=DTYPE, **options)
        cluster = "1x8 h200" if TOPOLOGY else "1x8 cpu"
        plan = mw.plan(example.train_step, example.state, example.batch, cluster=cluster, mesh=shape)
        lowered = spmd(plan, example.train_step, devices()).lower(example.state, example.batch)
        compiled = lowered.compile(compiler_options=OPTIONS)
        planned: Counter[str] = Counter()
        for sent in plan.collectives:
            planned[sent.kind] += sent.bytes * sent.trips
        made: Counter[str] = Counter()
        for item in collectives_of(compiled.as_text(), plan.mesh.shape):
            made[item.kind] += item.bytes * item.trips
        peak, used = plan.memory.peak_bytes, allocated(compiled)
        label = f"{model} {' '.join(f'{k}={v}' for k, v in options.items())}"
        rows.append(
            (
                label,
                "×".join(map(str, shape)),
                megabytes(planned),
                megabytes(made),
                f"{sum(made.values()) / max(sum(planned.values()), 1):.3f}",
                f"{peak / 1e6:.1f} → {used / 1e6:.1f} MB",
                f"{peak / used:.3f}",
            )
        )
    memory = ("memory planned → compiled", "planned ÷ compiled")
    header = ("program", "mesh", "planned MB", "compiled MB", "compiled ÷ planned", *memory)
    table(f"Compiled {TOPOLOGY or 'cpu'}", (__doc__ or "").split("\n")[0], header, rows)


if __name__ == "__main__":
    main()
