"""Does XLA hide the communication that plans count as hidden? Bytes beside compute, planned and compiled, for H200s.

Train steps are planned for one host or eight of 8 H200s and compiled for them, on one GPU of the kind
(`jax.experimental.topologies`). Planned as hidden is what the simulator plays beside compute; compiled as hidden is
what XLA starts early, with kernels between start and end. Programs are compiled with the plan's options and without.

    python benchmarks/hidden.py [1] [8]    # hosts
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from jax.experimental import topologies
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.runtime.checking.figures import total
from meshwright.runtime.checking.verify import Verification

PROGRAMS = [  # the model, rows of the batch on each device, options, method
    ("llama3-8b", 1, {"seq": 8192, "layers": 4, "checkpoint": "full"}, "zero3"),
    ("llama3-8b", 2, {"seq": 4096, "layers": 4, "checkpoint": "selective"}, "auto"),
    ("llama3-8b", 1, {"seq": 4096, "layers": 4, "scan": True, "checkpoint": "full"}, "zero3"),
    ("gpt3-1.3b", 4, {"seq": 2048, "layers": 4}, "data"),
    ("gpt3-1.3b", 4, {"seq": 2048, "layers": 4}, "zero2"),
    ("mixtral-8x7b", 1, {"seq": 4096, "layers": 2, "checkpoint": "selective"}, "auto"),
    ("vit-l16", 64, {"layers": 4}, "data"),
]
HEADER = (
    "hosts",
    "program",
    "method",
    "GB sent",
    "GB planned hidden",
    "of them compiled hidden",
    "without the options",
    "GiB planned",
    "compiled",
    "without the options",
    "seconds to compile",
)


def main(*hosts: int) -> None:
    rows = []
    for count in hosts:
        devices = topologies.get_topology_desc("h200", "cuda", topology=f"1x{count}x8").devices
        for model, share, options, method in PROGRAMS:
            example = zoo.build(model, batch=8 * count * share, **options)
            plan = mw.plan(
                example.train_step,
                example.state,
                example.batch,
                cluster=f"{count}x8 h200",
                mesh=(8,) if count == 1 else (count, 8),
                method=method,
            )
            started = time.perf_counter()
            with_options = verified(plan, devices, {})
            seconds = time.perf_counter() - started
            without = verified(plan, devices, dict.fromkeys(plan.compiler_options, False))
            text = " ".join(f"{key}={value}" for key, value in options.items())
            rows.append(
                (
                    str(count),
                    f"{model} {text}",
                    plan.method,
                    f"{with_options.bytes.planned / 1e9:.2f}",
                    f"{total(with_options.hidden.values()).planned / 1e9:.2f}",
                    f"{with_options.hidden_share:.0%}",
                    f"{without.hidden_share:.0%}",
                    f"{with_options.memory.planned / 2**30:.1f}",
                    f"{with_options.memory.compiled / 2**30:.1f}",
                    f"{without.memory.compiled / 2**30:.1f}",
                    f"{seconds:.0f}",
                )
            )
            table("Hidden h200", __doc__, HEADER, rows)
            print(with_options, flush=True)


def verified(plan: mw.Plan, devices: list, options: dict) -> Verification:
    found = plan.verify(devices=devices, compiler_options=options)
    assert isinstance(found, Verification)
    return found


if __name__ == "__main__":
    main(*(map(int, sys.argv[1:]) if len(sys.argv) > 1 else (1, 8)))
