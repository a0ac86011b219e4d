"""Stages for the page: what each is, and a timeline of the pipeline's schedule."""

from typing import TYPE_CHECKING, Any

from meshwright.explain.at_rest import stage_verdict
from meshwright.pipeline.schedules import table

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
    """For each stage what it does when: each step starts when the stage is free and what it needs has arrived."""
    assert plan.pipeline is not None
    pipeline, stages = plan.pipeline, plan.stages
    num_stages, chunks = len(stages), max(1, pipeline.interleave)
    rows = table(pipeline.schedule, num_stages, pipeline.num_microbatches, pipeline.interleave)
    done: dict[tuple[str, int, int], float] = {}  # work, microbatch, virtual stage → when it was finished
    free, place = [0.0] * num_stages, [0] * num_stages
    found: list[list[dict[str, Any]]] = [[] for _ in stages]
    last = num_stages * chunks - 1
    moved = True
    while moved:
        moved = False
        for s, row in enumerate(rows):
            while place[s] < len(row):
                step = row[place[s]]
                virtual = step.chunk * num_stages + s
                needs = _needs(step.work, step.microbatch, virtual, last, stages, num_stages)
                if any(key not in done for key, _ in needs):
                    break
                start = max([free[s], *(done[key] + late for key, late in needs)])
                stop = start + _seconds(stages[s], step.work, pipeline.schedule) / chunks
                done[step.work, step.microbatch, virtual] = free[s] = stop
                found[s].append({"work": step.work, "microbatch": step.microbatch, "start": start, "stop": stop})
                place[s] += 1
                moved = True
    return found


def _needs(
    work: str, microbatch: int, virtual: int, last: int, stages: Any, num_stages: int
) -> list[tuple[tuple[str, int, int], float]]:
    """What must be done before a step, each with the time that it takes to arrive."""
    if work == "forward":
        late = stages[(virtual - 1) % num_stages].transfer_s
        return [((work, microbatch, virtual - 1), late)] if virtual > 0 else []
    if work == "weights":
        return [(("backward", microbatch, virtual), 0.0)]
    needs = [(("forward", microbatch, virtual), 0.0)]
    if virtual < last:
        needs.append((("backward", microbatch, virtual + 1), stages[virtual % num_stages].transfer_s))
    return needs


def _seconds(stage: Any, work: str, schedule: str) -> float:
    """Seconds of one step; schedules that split the backward pass leave the weights' part of it for later."""
    if work == "forward":
        return stage.forward.total_s
    weights = stage.backward.compute_s * stage.weights_fraction if schedule.startswith("zb") else 0.0
    if work == "weights":
        return weights
    return stage.backward.total_s + stage.recompute.total_s - weights
