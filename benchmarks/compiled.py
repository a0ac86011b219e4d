"""Does XLA do what was planned? Predicted against compiled: bytes of each kind of collective, and memory.

On a machine without accelerators the programs are compiled for 8 virtual CPU devices, whose backend writes a
reduce-scatter as an all-reduce and a slice. `--topology h200` compiles for a host of 8 GPUs where only one of the kind
is there, or none and `--target h200.txtpb` describes it (`described.py` says how); `--hosts 8` for several such hosts;
`--dtype bfloat16` compiles for CPUs what they widen to float32.

Programs for GPUs are planned as they are written, by one search of the sum of costs: the question is what XLA makes of
a plan, not which plan is best.

Memory is what XLA allocates: arguments, temporaries and results that take no argument's place. It is packed, so it can
be more than what is ever live. XLA's CPU backend is kept from dropping barriers, which would undo checkpoints.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
TOPOLOGY = sys.argv[sys.argv.index("--topology") + 1] if "--topology" in sys.argv else None
DTYPE = sys.argv[sys.argv.index("--dtype") + 1] if "--dtype" in sys.argv else "bfloat16" if TOPOLOGY else "float32"
HOSTS = int(sys.argv[sys.argv.index("--hosts") + 1]) if "--hosts" in sys.argv else 1
TARGET = Path(sys.argv[sys.argv.index("--target") + 1]) if "--target" in sys.argv else None
if TOPOLOGY is None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from dataclasses import replace

import jax
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.planner.budget import Budget
from meshwright.planner.planner import plan_program
from meshwright.runtime.checking.verify import Verification

PROGRAMS = [
    ("mlp", {}),
    ("gpt-tiny", {}),
    *(
        ("llama-tiny", dict.fromkeys(options, True))
        for options in ((), ("scan",), ("checkpoint",), ("scan", "checkpoint"))
    ),
    *((name, {}) for name in ("moe-tiny", "mixtral-tiny", "bert-tiny", "vit-tiny", "wide-resnet-tiny", "unet-tiny")),
]
PLANS = [
    *((mw.Auto(), shape) for shape in ((8,), (2, 4), (2, 2, 2))),
    (mw.Zero(stage=3), (8,)),
    (mw.TensorParallel(), (2, 4)),
]
SMALL = [(name, {"batch": 16} | options, shape, method) for name, options in PROGRAMS for method, shape in PLANS]
LARGE = [
    (name, options | {"batch": HOSTS * options["batch"]}, shape if HOSTS == 1 else (HOSTS, 8))
    for name, options, shape in (
        ("llama2-7b", {"batch": 16, "seq": 2048, "layers": 4}, (8,)),
        ("llama2-7b", {"batch": 16, "seq": 2048, "layers": 4}, (2, 4)),
        ("llama2-7b", {"batch": 16, "seq": 2048, "layers": 4, "checkpoint": True}, (8,)),
        ("llama2-7b", {"batch": 64, "seq": 2048, "layers": 4, "checkpoint": True}, (2, 4)),
        ("llama2-7b", {"batch": 16, "seq": 2048, "layers": 4, "scan": True}, (8,)),
        ("llama2-7b", {"batch": 16, "seq": 2048, "layers": 4, "scan": True, "checkpoint": True}, (8,)),
        ("gpt3-1.3b", {"batch": 16, "seq": 1024, "layers": 4}, (2, 4)),
        ("mixtral-8x7b", {"batch": 8, "seq": 2048, "layers": 2}, (8,)),
    )
]
LARGE = [case for i, case in enumerate(LARGE) if case not in LARGE[:i]]
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_disable_hlo_passes": "cse_barrier_expander",
}
if jax.__version_info__ < (0, 11):  # the older emitters compile several times as quickly; later versions have none
    QUICK["xla_cpu_use_fusion_emitters"] = False
OPTIONS = {} if TOPOLOGY else QUICK


def devices() -> list[jax.Device]:
    if TOPOLOGY is None:
        return jax.devices()
    from jax.experimental import topologies

    described = {} if TARGET is None else {"target_config": TARGET.read_text()}
    return topologies.get_topology_desc(TOPOLOGY, "cuda", topology=f"1x{HOSTS}x8", **described).devices


def planned(example: zoo.Example, shape: tuple[int, ...], method: mw.Auto) -> mw.Plan:
    """The plan of a program for GPUs, as it is written."""
    cluster = mw.cluster(f"{HOSTS}x8 {TOPOLOGY}")
    traced = trace(example.train_step, example.state, example.batch, cluster=cluster)
    as_written = replace(method, recompute="as written")
    return mw.Plan.of(plan_program(traced, [cluster.mesh(shape)], as_written, lambda said: None, Budget(None)))


def worst(found: Verification) -> str:
    """The kind and axes of collectives that are furthest from the plan."""
    pairs = {key: abs(pair.compiled - pair.planned) for key, pair in found.collectives.items()}
    kind, axes = max(pairs, key=lambda key: pairs[key], default=("", ()))
    if not pairs or pairs[kind, axes] <= 0.01 * max(found.bytes.planned, 1):
        return ""
    pair = found.collectives[kind, axes]
    return f"{kind} over {', '.join(axes)}: {pair.planned / 1e6:.2f} → {pair.compiled / 1e6:.2f}"


def main() -> None:
    rows = []
    cases = [(*case, mw.Auto()) for case in LARGE] if TOPOLOGY else SMALL
    for model, options, shape, method in cases:
        example = zoo.build(model, dtype=DTYPE, **options)
        if TOPOLOGY:
            plan = planned(example, shape, method)
        else:
            step = example.train_step, example.state, example.batch
            plan = mw.plan(*step, cluster="1x8 cpu", mesh=shape, method=method)
        found = plan.verify(devices=devices(), compiler_options=OPTIONS)
        rows.append(
            (
                f"{model} {' '.join(f'{k}={v}' for k, v in options.items())}",
                f"{plan.method} {'×'.join(map(str, shape))}",
                f"{found.bytes.planned / 1e6:.2f} → {found.bytes.compiled / 1e6:.2f}",
                f"{found.bytes.ratio:.3f}",
                worst(found),
                f"{found.flops.ratio:.3f}",
                f"{found.memory.planned / 1e6:.1f} → {found.memory.compiled / 1e6:.1f}",
                f"{found.memory.planned / found.memory.compiled:.3f}",
            )
        )
    sent = ("MB sent, planned → compiled", "compiled ÷ planned", "furthest off")
    memory = ("MB of memory, planned → compiled", "planned ÷ compiled")
    header = ("program", "plan", *sent, "flops, compiled ÷ planned", *memory)
    table(
        f"Compiled {TOPOLOGY or 'cpu'}"
        + (f" {HOSTS} hosts" if HOSTS > 1 else "")
        + (f" {DTYPE}" if "--dtype" in sys.argv else ""),
        (__doc__ or "").split("\n")[0],
        header,
        rows,
    )


if __name__ == "__main__":
    main()
