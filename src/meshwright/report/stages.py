"""Stages for the page: what each is, and a timeline of a simulated step."""

from typing import TYPE_CHECKING, Any

from meshwright.explain.at_rest import stage_verdict

if TYPE_CHECKING:
    from meshwright.planner.plan import Plan


def stage_data(plan: "Plan") -> dict[str, Any]:
    """Stages and the bars of the timeline."""
    assert plan.pipeline is not None
    pipeline = plan.pipeline
    return {
        "pipeline": {
            "schedule": pipeline.schedule,
            "num_microbatches": pipeline.num_microbatches,
            "interleave": pipeline.interleave,
            "checkpoint": pipeline.checkpoint,
        },
        "stages": [
            {
                "layers": list(stage.layers),
                "mesh": "×".join(map(str, stage.mesh.sizes)),
                "devices": f"{stage.submesh.num_hosts}×{stage.submesh.devices_per_host} {stage.submesh.chip}",
                "verdict": str(stage_verdict(stage)),
                "method": stage.method,
                "microbatch_s": stage.microbatch_s,
                "once_s": stage.once_s,
                "transfer_s": stage.transfer_s,
                "state": stage.state_bytes,
                "activations": stage.activation_bytes,
                "peak": stage.peak_bytes,
            }
            for stage in plan.stages
        ],
        "bars": bars(plan),
    }


def bars(plan: "Plan") -> list[list[dict[str, Any]]]:
    """For each stage what it does when, as a simulated step has it."""
    return [
        [
            {"work": p.step.work, "microbatch": p.step.microbatch, "start": p.start_s, "stop": p.end_s}
            for p in run.passes
        ]
        for run in plan.simulate().stages
    ]
