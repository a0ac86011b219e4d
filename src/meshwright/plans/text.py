"""How figures of plans are written wherever they are shown."""

from collections.abc import Mapping, Sequence
from math import isfinite

from meshwright.plans.plan import PlanData
from meshwright.units import format_seconds

_NOTHING_AGAIN = ("as written", "none")  # plans that compute again no more than the program says


def cost_text(plan: PlanData, value: float) -> str:
    """A cost with its unit; abstract meshes have none."""
    return f"{value:,.6g}" if plan.mesh.is_abstract else format_seconds(value)


def status_text(plan: PlanData) -> str:
    """What is proven of a plan; the proof is about the cost model, by which no plan overlaps its communication."""
    return "optimal for the cost model" if plan.solution.status == "optimal" else plan.solution.status


def gap_text(plan: PlanData) -> str:
    """How far a plan may be above the best, in words."""
    bound = cost_text(plan, plan.solution.lower_bound)
    if not isfinite(plan.solution.gap):
        return f"no lower bound above {bound} is known"
    said = f"at most {100 * plan.solution.gap:.2f}% above the lower bound {bound}"
    least = plan.solution.of_any_program
    if not least or (plan.microbatches == 1 and plan.recompute in _NOTHING_AGAIN):
        return said
    others = f"with other recomputation or microbatches no plan costs less than {cost_text(plan, least)}"
    return f"{said} for this program; {others}"


def mesh_text(plan: PlanData) -> str:
    """The mesh (of a pipelined plan, those of its stages) and the machines behind it."""
    return f"{axes_text(plan)} ({'abstract' if plan.mesh.cluster is None else plan.mesh.cluster})"


def axes_text(plan: PlanData) -> str:
    """The axes of the mesh; of a pipelined plan those of each stage's."""
    if not plan.stages:
        return _axes(plan.mesh.shape)
    numbers: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        numbers.setdefault(_axes(stage.mesh.shape), []).append(number)
    if len(numbers) == 1:
        return f"{next(iter(numbers))} for each of {len(plan.stages)} stages"
    return ", ".join(f"{mesh} for {stages_text(numbers_of_mesh)}" for mesh, numbers_of_mesh in numbers.items())


def stages_text(numbers: Sequence[int]) -> str:
    """``stage 2``, ``stages 0–3`` or ``stages 0, 2``."""
    if len(numbers) == 1:
        return f"stage {numbers[0]}"
    runs = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"stages {numbers[0]}–{numbers[-1]}" if runs else f"stages {', '.join(map(str, numbers))}"


def _axes(shape: Mapping[str, int]) -> str:
    return " × ".join(f"{name}={size}" for name, size in shape.items())
