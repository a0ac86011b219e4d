"""Does planning time grow with depth? From 8 to 80 layers it should at most double, tracing apart."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.planner.planner import Task

DEPTHS = (8, 20, 40, 80)


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
        times = []
        for meshes in ([cluster.mesh((50, 4))], method.meshes(cluster)):
            started = time.perf_counter()
            Task(traced, method).plan(meshes, lambda _: None)
            times.append(time.perf_counter() - started)
        first = first or times
        ratios = [f"{t:.2f} s ({t / f:.2f}×)" for t, f in zip(times, first, strict=True)]
        rows.append((layers, len(traced.graph.ops), f"{tracing:.2f} s", *ratios))
    table("Depth", __doc__ or "", ("layers", "operations", "tracing", "one view, 50×4", "Auto, all views"), rows)


if __name__ == "__main__":
    main()
