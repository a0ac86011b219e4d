"""How long does planning take beyond JAX's own tracing, on one mesh view and over all of them?

The best of three runs.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax
from report import table

import meshwright as mw
from meshwright import zoo

JOBS = [
    # model, cluster, one view, batch, sequence length
    ("llama2-13b", "50x4 a100-40gb", (25, 8), 200, 2048),
    ("llama2-13b", "50x4 a100-80gb", (50, 4), 200, 2048),
    ("llama3-8b", "8x8 h100", (8, 8), 64, 4096),
]
RUNS = 3


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock seconds of a call that finds JAX's caches empty, at best."""
    found = []
    for _ in range(RUNS):
        jax.clear_caches()
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return min(found)


def main() -> None:
    warm = zoo.build("llama-tiny")
    mw.plan(warm.train_step, warm.state, warm.batch, cluster="2x4 h100")  # loads compiled kernels
    rows = []
    for model, where, shape, batch, seq in JOBS:
        example = zoo.build(model, batch=batch, seq=seq, checkpoint=True)
        step, args = example.train_step, (example.state, example.batch)
        cluster = mw.cluster(where)
        tracing = seconds(lambda: jax.make_jaxpr(step)(*args))  # noqa: B023
        one = seconds(lambda: mw.plan(step, *args, cluster=cluster, mesh=shape))  # noqa: B023
        plans: list[mw.Plan] = []
        every = seconds(lambda: plans.append(mw.plan(step, *args, cluster=cluster)))  # noqa: B023
        best = plans[0]
        rows.append(
            (
                model,
                where,
                f"{tracing:.2f} s",
                f"{'×'.join(map(str, shape))}: {one - tracing:.2f} s",
                f"{len(best.considered)} views: {every - tracing:.2f} s",
                "×".join(map(str, best.mesh.sizes)),
                f"{best.step_s:.3f} s",
                f"{100 * best.solution.gap:.2f}%",
            )
        )
    table(
        "Planning time",
        __doc__ or "",
        ("model", "cluster", "JAX's tracing", "one view, beyond", "Auto, beyond", "best view", "step", "gap to bound"),
        rows,
    )


if __name__ == "__main__":
    main()
