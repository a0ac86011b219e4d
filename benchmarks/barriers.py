"""What do barriers between layers save? Planned and compiled memory of train steps for H200s, with and without them.

The programs are compiled on one GPU for clusters of its kind, `--hosts 1` or `--hosts 8`. A barrier keeps the gradients
of a layer's weights from waiting for the reductions of all others'; so the table also has the simulated step, and how
many collectives XLA starts before it needs them. `--simulate "4x8 v100" …` only simulates, which needs no GPU: whether
compute waits at barriers for reductions that could go on beside later layers.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
HOSTS = int(sys.argv[sys.argv.index("--hosts") + 1]) if "--hosts" in sys.argv else 1

from jax.experimental import topologies
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.planner.planner import Task
from meshwright.plans.plan import PlanData
from meshwright.runtime.checking.verify import verify
from meshwright.simulator.simulate import simulate

PROGRAMS = [  # the model, rows of the batch on each device, options, method
    ("llama3-8b", 1, {"seq": 8192, "layers": 4, "checkpoint": "full"}, mw.Zero(stage=3)),
    ("llama3-8b", 1, {"seq": 8192, "layers": 8, "checkpoint": "full"}, mw.Zero(stage=3)),
    ("llama3-8b", 2, {"seq": 4096, "layers": 8, "checkpoint": "selective"}, mw.Zero(stage=3)),
    ("llama3-8b", 1, {"seq": 4096, "layers": 8}, mw.Zero(stage=3)),
    ("gpt3-1.3b", 4, {"seq": 2048, "layers": 8, "checkpoint": "full"}, mw.DataParallel()),
    ("gpt3-1.3b", 4, {"seq": 2048, "layers": 8, "checkpoint": "full"}, mw.Zero(stage=2)),
    ("mixtral-8x7b", 2, {"seq": 4096, "layers": 3, "checkpoint": "full"}, mw.Zero(stage=3)),
    ("vit-l16", 64, {"layers": 8}, mw.DataParallel()),
]


SIMULATED = [
    ("llama3-8b", 1, {"seq": 4096, "layers": 8, "checkpoint": "full"}),
    ("gpt3-1.3b", 2, {"seq": 2048, "layers": 8}),
    ("bert-large", 8, {"layers": 6}),
    ("vit-l16", 32, {"layers": 6}),
    ("mixtral-8x7b", 1, {"seq": 2048, "layers": 3}),
    ("mlp", 64, {}),
    ("wide-resnet-50-2", 32, {}),
]


class WithoutBarriers:
    """The operations and collectives of a plan, without its barriers."""

    def __init__(self, plan: PlanData):
        self.ops = tuple(replace(op, barrier=0) for op in plan.ops)
        self.collectives = plan.collectives


def simulated(descriptions: list[str]) -> None:
    rows = []
    for description in descriptions:
        cluster = mw.cluster(description)
        for model, share, options in SIMULATED:
            example = zoo.build(model, batch=cluster.num_devices * share, **options)
            traced = trace(example.train_step, example.state, example.batch, cluster=cluster)
            for method in (mw.DataParallel(), mw.Zero(stage=3)):
                try:
                    plan = Task(traced, method).plan([cluster.mesh((cluster.num_devices,))], lambda _: None)
                except mw.DoesNotFit:
                    continue
                steps = [simulate(one).step_s for one in (replace(plan, details=WithoutBarriers(plan)), plan)]
                held = sum(op.barrier > 0 for op in plan.ops)
                change = f"{steps[1] / steps[0] - 1:+.1%}"
                text = " ".join(f"{key}={value}" for key, value in options.items())
                rows.append((description, f"{model} {text}", method.name, held, f"{steps[0] * 1e3:.2f}", change))
                print(*rows[-1], sep=" | ", flush=True)
    header = ("cluster", "program", "method", "values that pass barriers", "simulated ms without", "with")
    table("Barriers simulated", "Do simulated steps take longer with barriers between layers?", header, rows)


def main() -> None:
    if "--simulate" in sys.argv:
        simulated(sys.argv[sys.argv.index("--simulate") + 1 :])
        return
    rows = []
    devices = topologies.get_topology_desc("h200", "cuda", topology=f"1x{HOSTS}x8").devices
    cluster = mw.cluster(f"{HOSTS}x8 h200")
    for model, share, options, method in PROGRAMS:
        example = zoo.build(model, batch=8 * HOSTS * share, **options)
        traced = trace(example.train_step, example.state, example.batch, cluster=cluster)
        planned, compiled, started, steps = [], [], [], []
        for barriers in (False, True):
            task = Task(traced, method, num_devices=8 * HOSTS, barriers=barriers)
            plan = task.plan([cluster.mesh((8 * HOSTS,))], lambda _: None)
            found = verify(plan, devices=devices)
            planned.append(f"{found.memory.planned / 2**30:.2f}")
            compiled.append(f"{found.memory.compiled / 2**30:.2f}")
            started.append(str(found.text.count("-start(")))
            steps.append(f"{simulate(plan).step_s * 1e3:.1f}")
        ratio = found.memory.planned / found.memory.compiled
        text = " ".join(f"{key}={value}" for key, value in options.items())
        pairs = (" → ".join(pair) for pair in (planned, compiled, started, steps))
        rows.append((f"{model} {text}", method.name, *pairs, f"{ratio:.3f}", f"{found.bytes.ratio:.3f}"))
        print(*rows[-1], sep=" | ", flush=True)
    header = (
        "program",
        "method",
        "planned GiB, without → with",
        "compiled GiB",
        "collectives started early",
        "simulated ms",
        "planned ÷ compiled with barriers",
        "bytes sent, compiled ÷ planned",
    )
    table(f"Barriers {HOSTS}x8 h200", (__doc__ or "").split("\n")[0], header, rows)


if __name__ == "__main__":
    main()
