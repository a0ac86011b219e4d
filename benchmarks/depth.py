"""Does planning time grow with depth? From 8 to 80 layers it should at most double, tracing apart.

The limit is 0.9 of an H200's memory, which 40 layers do not fill on 50×4 and 80 layers would exceed by a third; and, on
that view, memory that is as tight at every depth: half-way between what is needed at the least and what would be best.
The best of five runs, depth after depth in each. Tracing is what `mw.plan` does before it plans, with JAX's own in it;
beside it JAX's own by itself, `jax.make_jaxpr`, which does not pause the garbage collector meanwhile.
"""

import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax
import numpy as np
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.graph import Traced, trace
from meshwright.graph.tracing.garbage import heap_frozen
from meshwright.hardware import Mesh
from meshwright.planner.planner import Task
from meshwright.planner.solving.fit_memory import View, ViewState

DEPTHS = (8, 20, 40, 80)
SHAPE = (50, 4)
RUNS = 5


class Tight(Task):
    """A task under another limit than its cluster's."""

    allowed = 0.0

    def limit(self, mesh: Mesh) -> float:
        return self.allowed


def half_way(task: Task, mesh: Mesh) -> float:
    """The limit that is as tight at every depth."""
    state = ViewState(View(task.formulate(mesh), None)).step()
    return float(state.formulation.memory.least().peak_bytes + state.peak_bytes) / 2


def prepared(layers: int, cluster: mw.Cluster, method: mw.Auto) -> tuple[Traced, tuple[float, float], float]:
    """A model of some depth, the seconds that tracing it took us and took JAX, and the limit that is tight."""
    example = zoo.build("llama2-13b", batch=200, seq=2048, layers=layers, checkpoint=True)
    seconds = []
    for make in (jax.make_jaxpr(example.train_step), partial(trace, example.train_step)):
        jax.clear_caches()
        started = time.perf_counter()
        traced = make(example.state, example.batch)
        seconds.append(time.perf_counter() - started)
    return traced, (seconds[1], seconds[0]), half_way(Task(traced, method), cluster.mesh(SHAPE))


def main() -> None:
    cluster = mw.cluster("50x4 h200")  # 80 layers must fit too
    method = mw.Auto()
    warm = zoo.build("llama-tiny")
    mw.plan(warm.train_step, warm.state, warm.batch, cluster="2x4 h100")
    known = [prepared(layers, cluster, method) for layers in DEPTHS]
    best = np.full((len(DEPTHS), 3), np.inf)
    for _ in range(RUNS):
        for at, (traced, _, allowed) in enumerate(known):
            Tight.allowed, view = allowed, cluster.mesh(SHAPE)
            for which, (kind, meshes) in enumerate(((Task, [view]), (Tight, [view]), (Task, method.meshes(cluster)))):
                started = time.perf_counter()
                with heap_frozen():  # as `mw.plan` does it
                    kind(traced, method).plan(meshes, lambda _: None)
                best[at, which] = min(best[at, which], time.perf_counter() - started)
    rows = []
    for layers, (traced, tracing, _), times in zip(DEPTHS, known, best, strict=True):
        ratios = [f"{t:.2f} s ({t / f:.2f}×)" for t, f in zip(times, best[0], strict=True)]
        rows.append((layers, len(traced.graph.ops), *(f"{t:.2f} s" for t in tracing), *ratios))
    header = (
        "layers",
        "operations",
        "tracing",
        "JAX's own",
        "one view, 50×4",
        "the same, in tight memory",
        "Auto, all views",
    )
    table("Depth", __doc__ or "", header, rows)


if __name__ == "__main__":
    main()
