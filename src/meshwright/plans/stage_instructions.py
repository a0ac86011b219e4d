"""The instructions of a plan's stages: what each does in a step, in order."""

from meshwright.errors import ShardingError
from meshwright.plans.plan import PlanData
from meshwright.schedules import table
from meshwright.schedules.base import BACKWARD
from meshwright.schedules.instructions import Instruction, chain, instruct


def stage_instructions(plan: PlanData) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions of each stage of a plan whose layers read one another in a row.

    A model in which stages read more of each other, or whose update exchanges more than once, has more of them: a
    program that runs has its own list.

    Raises:
        ShardingError: The plan has no stages.
    """
    if plan.pipeline is None:
        raise ShardingError(f"the plan is one program over {plan.mesh.num_devices} devices and has no stages")
    pipeline, count = plan.pipeline, len(plan.stages)
    rows = table(pipeline.schedule, count, pipeline.num_microbatches, pipeline.interleave)
    trains = any(step.work == BACKWARD for step in rows[0])
    return instruct(rows, chain(count * pipeline.interleave, trains), _shares(plan), num_rounds=2 if trains else 0)


def _shares(plan: PlanData) -> list[tuple[int, int]]:
    """Pairs of stages of which the first sends the second parameters that both read."""
    first: dict[str, int] = {}
    found: set[tuple[int, int]] = set()
    whole = {t.path: t.shape for t in plan.arguments}
    for number, stage in enumerate(plan.stages):
        for tensor in stage.tensors:
            if tensor.role == "parameters" and tensor.shape == whole.get(tensor.path):
                owner = first.setdefault(tensor.path, number)
                if owner != number:
                    found.add((owner, number))
    return sorted(found)
