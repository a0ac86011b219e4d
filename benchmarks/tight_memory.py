"""Is a named method ever faster than Auto where memory is tight? The zoo at full size on eight clusters.

Limits are shares of what the best plan needs without a limit. Named methods are planned alone, on their own views.

python benchmarks/tight_memory.py              # all jobs; hours on two cores
python benchmarks/tight_memory.py bert vit     # the jobs whose models contain one of these
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.graph import Traced, trace
from meshwright.hardware import Mesh
from meshwright.hardware.load import cluster
from meshwright.planner.methods import NAMED, Method
from meshwright.planner.planner import Task
from meshwright.plans.plan import PlanData

SHARES = (1.0, 0.85, 0.7, 0.5, 0.3)
JOBS = [
    # model, options, cluster
    ("bert-large", {"batch": 512, "seq": 512}, "4x4 a100-40gb"),
    ("vit-l16", {"batch": 1024}, "1x8 h100"),
    ("gpt3-1.3b", {"batch": 256, "seq": 1024}, "2x8 v100-32gb"),
    ("llama2-7b", {"batch": 256, "seq": 2048, "checkpoint": True}, "8x8 h100"),
    ("llama3-8b", {"batch": 512, "seq": 8192, "checkpoint": "full"}, "16x8 h100"),
    ("wide-resnet-250m", {"batch": 1024}, "1x16 v100-32gb"),
    ("gshard-moe-2.4b", {"batch": 256, "seq": 1024}, "2x4 a100-80gb"),
    ("llama3-70b", {"batch": 64, "seq": 4096, "checkpoint": True}, "4x8 h200"),
]


class Limited(Task):
    """A task under a limit of its own."""

    def __init__(self, traced: Traced, method: Method, num_bytes: float | None, num_devices: int):
        super().__init__(traced, method, num_devices=num_devices)
        self.num_bytes = num_bytes

    def limit(self, mesh: Mesh) -> float | None:
        return self.num_bytes


def planned(traced: Traced, method: Method, num_bytes: float | None, machines: mw.Cluster) -> PlanData | None:
    """The plan under a limit; None where nothing fits, or the shapes do not suit the method."""
    meshes = method.divided(traced.graph, method.meshes(machines))
    try:
        return Limited(traced, method, num_bytes, machines.num_devices).plan(meshes, lambda _: None)
    except (mw.DoesNotFit, mw.ShardingError):
        return None


def compared(model: str, options: dict, description: str) -> list[tuple[str, ...]]:
    """A row for each limit."""
    machines, example = cluster(description), zoo.build(model, **options)
    traced = trace(example.train_step, example.state, example.batch, cluster=machines)
    free = planned(traced, mw.Auto(), None, machines)
    assert free is not None
    rows = []
    for share in SHARES:
        limit = share * free.memory.peak_bytes
        auto = planned(traced, mw.Auto(), limit, machines)
        found = {method.name: planned(traced, method, limit, machines) for method in NAMED}
        costs = {name: plan.cost.total for name, plan in found.items() if plan is not None}
        named = min(costs, key=costs.__getitem__, default="–")
        cells = ("–", "–") if auto is None else (f"{auto.cost.total:.4g} s", f"{100 * auto.solution.gap:.1f}%")
        ratio = f"{costs[named] / auto.cost.total:.3f}×" if auto is not None and costs else "does not fit"
        worse = costs and (auto is None or min(costs.values()) < auto.cost.total * (1 - 1e-9))
        rows.append((model, description, f"{share:.2f}", *cells, named, ratio, "worse" if worse else ""))
        print(*rows[-1], flush=True)
    return rows


def main(*wanted: str) -> None:
    jobs = [job for job in JOBS if not wanted or any(part in job[0] for part in wanted)]
    rows = [row for job in jobs for row in compared(*job)]
    worse = sum(row[-1] == "worse" for row in rows)
    names = ("model", "cluster", "limit", "Auto", "gap", "best named", "it takes", f"Auto is worse ({worse})")
    table("Tight memory", (__doc__ or "").splitlines()[0], names, rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
