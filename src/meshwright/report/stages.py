"""Stages for the page: each one's description, its memory over a simulated step, and its limit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.plans.stage_text import layers_text
from meshwright.simulator.timeline import IDLE, DeviceTimeline

if TYPE_CHECKING:
    from meshwright.plans.plan import PlanData
    from meshwright.schedules.instructions import Instruction
    from meshwright.simulator.simulation import Simulation

_MOMENTS = 480  # of memory over time
_INSTRUCTIONS = 400  # of a stage


def stage_data(plan: "PlanData", simulated: "Simulation") -> dict[str, Any]:
    """Stages, and their memory over time."""
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
                "limit": limit,
                "idle": DeviceTimeline(simulated, number).seconds(IDLE) / simulated.step_s if simulated.step_s else 0.0,
            }
            for number, (stage, verdict, limit) in enumerate(
                zip(plan.stages, plan.stage_verdicts, stage_limits(plan), strict=True)
            )
        ],
        "instructions": [_listed(instructions) for instructions in simulated.work.instructions],
        "memory_series": [_thinned(series) for series in simulated.memory],
    }


def _listed(own: Sequence["Instruction"]) -> dict[str, Any]:
    """A stage's instructions, as far as the page shows them."""
    rows = [[one.do, one.work, one.microbatch, one.chunk, one.peer, one.round] for one in own[:_INSTRUCTIONS]]
    return {"shown": rows, "left_out": len(own) - len(rows)}


def _thinned(series: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Memory over time at no more than `_MOMENTS` moments: the peak of each interval, so that no peak is lost."""
    step = -(-len(series) // _MOMENTS)
    groups = [series[i : i + step] for i in range(0, len(series), step)]
    return [[group[0][0], round(max(size for _, size in group))] for group in groups]


def stage_limits(plan: "PlanData") -> list[int | None]:
    """The memory limit of each stage's devices: the same fraction as on the fullest stage."""
    cluster, limit = plan.mesh.cluster, plan.memory.limit_bytes
    if cluster is None or limit is None:
        return [None] * len(plan.stages)
    sizes = [stage.submesh.machines(cluster).memory_bytes for stage in plan.stages]
    fullest = max(range(len(sizes)), key=lambda number: plan.stages[number].peak_bytes)
    return [round(limit * size / sizes[fullest]) for size in sizes]
