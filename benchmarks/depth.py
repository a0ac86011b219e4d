"""Does planning time grow with depth? From 8 to 80 layers it should at most double, tracing apart.

The limit is 0.9 of an H200's memory, which 40 layers do not fill on 50×4 and 80 layers would exceed by a third; and, on
that view, memory that is as tight at every depth: half-way between what is needed at the least and what would be best.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.hardware import Mesh
from meshwright.planner.fitting import View
from meshwright.planner.planner import Task

DEPTHS = (8, 20, 40, 80)
SHAPE = (50, 4)


class Tight(Task):
    """A task under another limit than its cluster's."""

    allowed = 0.0

    def limit(self, mesh: Mesh) -> float:
        return self.allowed


def half_way(task: Task, mesh: Mesh) -> float:
    """The limit that is as tight at every depth."""
    view = View(task.formulate(mesh), None)
    view.step()
    return float(view.formulation.memory.least().peak_bytes + view.peak_bytes) / 2


def main() -> None:
    cluster = mw.cluster("50x4 h200")  # 80 layers must fit too
    method = mw.Auto()
    warm = zoo.build("llama-tiny")
    mw.plan(warm.train_step, warm.state, warm.batch, cluster="2x4 h100")
    rows, first = [], None
    for layers in DEPTHS:
        example = zoo.build("llama2-13b", batch=200, seq=2048, layers=layers, checkpoint=True)
        started = time.perf_counter()
        traced = trace(example.train_step, example.state, example.batch)
        tracing = time.perf_counter() - started
        view, times = cluster.mesh(SHAPE), []
        Tight.allowed = half_way(Task(traced, method), view)
        for kind, meshes in ((Task, [view]), (Tight, [view]), (Task, method.meshes(cluster))):
            started = time.perf_counter()
            kind(traced, method).plan(meshes, lambda _: None)
            times.append(time.perf_counter() - started)
        first = first or times
        ratios = [f"{t:.2f} s ({t / f:.2f}×)" for t, f in zip(times, first, strict=True)]
        rows.append((layers, len(traced.graph.ops), f"{tracing:.2f} s", *ratios))
    header = ("layers", "operations", "tracing", "one view, 50×4", "the same, in tight memory", "Auto, all views")
    table("Depth", __doc__ or "", header, rows)


if __name__ == "__main__":
    main()
