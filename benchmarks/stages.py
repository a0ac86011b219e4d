"""How long does cutting a model into stages take, and what is found? Whole searches, with JAX's tracing.

CPU seconds of the process that does it all, which other work on a shared machine disturbs less than those of the clock.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.units import format_seconds

JOBS = [
    # model, cluster, batch, options of the zoo
    ("alpa-gpt-39b", "8x8 v100-16gb", 1024, {"dtype": "float16"}),
    ("llama2-13b", "50x4 a100-40gb", 200, {}),
    ("llama3-405b", "2048x8 h100", 2048, {}),
    ("llama2-7b", "2x8 h100 + 4x8 a100-40gb", 256, {}),
]


def main() -> None:
    warm = zoo.build("gpt-tiny", batch=8)
    mw.plan(warm.train_step, warm.state, warm.batch, cluster="2x2 h100", method=mw.Auto(pipeline=True))
    rows = []
    for model, where, batch, options in JOBS:
        example = zoo.build(model, batch=batch, **options)
        args = (example.train_step, example.state, example.batch)
        jax.clear_caches()
        started = time.process_time()
        jax.make_jaxpr(args[0])(*args[1:])
        tracing = time.process_time() - started
        jax.clear_caches()
        started = time.process_time()
        plan = mw.plan(*args, cluster=where, method=mw.Auto(pipeline=True))
        whole = time.process_time() - started
        rows.append(
            (
                model,
                where,
                batch,
                f"{tracing:.1f} s",
                f"{whole:.1f} s",
                _pipeline(plan),
                _plain(args, where),
                _step(plan),
            )
        )
    header = ("model", "cluster", "batch", "JAX's tracing", "whole search", "found", "step without stages", "step")
    table("Stages", __doc__ or "", header, rows)


def _pipeline(plan: mw.Plan) -> str:
    if plan.pipeline is None:
        return f"no stages, mesh {plan.mesh.sizes}"
    sizes = sorted({"×".join(map(str, stage.mesh.sizes)) for stage in plan.stages})
    how = plan.pipeline
    chunks = f" × {how.interleave} chunks" if how.interleave > 1 else ""
    return (
        f"{len(plan.stages)} stages{chunks} on {' and '.join(sizes)}, {how.schedule}, {how.num_microbatches} "
        f"microbatches, checkpoint {how.checkpoint}; {plan.provenance['stages']}"
    )


def _plain(args: tuple, where: str) -> str:
    try:
        return _step(mw.plan(*args, cluster=where))
    except (mw.DoesNotFit, mw.ClusterError) as error:
        return type(error).__name__


def _step(plan: mw.Plan) -> str:
    return format_seconds(plan.step_s)


if __name__ == "__main__":
    main()
