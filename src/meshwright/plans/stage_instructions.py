"""The instructions of a plan's stages: what each does in a step, in order."""

from meshwright.errors import ShardingError
from meshwright.plans.plan import PlanData
from meshwright.schedules.instructions import Instruction, instructions_in_a_row


def stage_instructions(plan: PlanData) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions of each stage of a plan whose layers read one another in a row.

    A model in which stages read more of each other, or whose update exchanges more than once, has more of them: a
    program that runs has its own list.

    Raises:
        ShardingError: The plan has no stages.
    """
    if plan.pipeline is None:
        raise ShardingError(f"the plan is one program over {plan.mesh.num_devices} devices and has no stages")
    pipeline = plan.pipeline
    sizes = (len(plan.stages), pipeline.num_microbatches, pipeline.interleave)
    return instructions_in_a_row(pipeline.schedule, *sizes, _shares(plan))


def _shares(plan: PlanData) -> tuple[tuple[int, int], ...]:
    """Pairs of stages of which the first sends the second parameters that both read."""
    first: dict[str, int] = {}
    pairs: set[tuple[int, int]] = set()
    whole = {t.path: t.shape for t in plan.arguments}
    for number, stage in enumerate(plan.stages):
        for tensor in stage.tensors:
            if tensor.role == "parameters" and tensor.shape == whole.get(tensor.path):
                owner = first.setdefault(tensor.path, number)
                if owner != number:
                    pairs.add((owner, number))
    return tuple(sorted(pairs))
