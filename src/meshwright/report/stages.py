"""Stages for the page: what each is, and a timeline of a simulated step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.planner.show_stages import layers_text

if TYPE_CHECKING:
    from meshwright.planner.plan import Plan
    from meshwright.simulator.simulation import Simulation

_MOMENTS = 480  # of memory over time


def stage_data(plan: "Plan") -> dict[str, Any]:
    """Stages and the bars of the timeline."""
    assert plan.pipeline is not None
    pipeline, simulated = plan.pipeline, plan.simulate()
    return {
        "pipeline": {
            "schedule": pipeline.schedule,
            "num_microbatches": pipeline.num_microbatches,
            "interleave": pipeline.interleave,
            "checkpoint": pipeline.checkpoint,
        },
        "stages": [
            {
                "layers": layers_text(stage),
                "mesh": "×".join(map(str, stage.mesh.sizes)),
                "devices": f"{stage.submesh.num_hosts}×{stage.submesh.devices_per_host} {stage.submesh.chip}",
                "verdict": str(verdict),
                "method": stage.method,
                "microbatch_s": stage.microbatch_s,
                "once_s": stage.once_s,
                "transfer_s": stage.transfer_s,
                "state": stage.state_bytes,
                "activations": stage.activation_bytes,
                "peak": stage.peak_bytes,
            }
            for stage, verdict in zip(plan.stages, plan.stage_verdicts, strict=True)
        ],
        "bars": bars(simulated),
        "memory_series": [_thinned(series) for series in simulated.memory],
    }


def _thinned(series: Sequence[tuple[float, float]]) -> list[list[float]]:
    """At most so many moments of memory over time: of each stretch the one that needs most, so that no peak is lost."""
    step = -(-len(series) // _MOMENTS)
    groups = [series[i : i + step] for i in range(0, len(series), step)]
    return [[group[0][0], round(max(size for _, size in group))] for group in groups]


def bars(simulated: "Simulation") -> list[list[dict[str, Any]]]:
    """For each stage what it does when, as a simulated step has it."""
    return [
        [
            {"work": p.step.work, "microbatch": p.step.microbatch, "start": p.start_s, "stop": p.end_s}
            for p in run.passes
        ]
        for run in simulated.stages
    ]
