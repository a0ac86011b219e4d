"""Which of several plans of a step to take: the quickest as simulated, or a simpler one that is nearly as quick."""

from collections.abc import Sequence

from meshwright.plans.plan import PlanData
from meshwright.simulator.simulate import simulate

NEARLY = 0.01  # part of the step's time that a simpler plan may take longer


def simulated_s(plan: PlanData) -> float:
    """Seconds of a step as simulated; on an abstract mesh, whose costs are not seconds, as planned."""
    return plan.step_s if plan.mesh.is_abstract else simulate(plan).step_s


def complexity(plan: PlanData) -> tuple[int, int, int, int]:
    """What makes a plan harder to understand: distinct splits, stages, their chunks, microbatches."""
    splits = {(tensor.role, tensor.spec) for tensor in plan.arguments if tensor.role in ("parameters", "optimizer")}
    chunks = plan.pipeline.interleave if plan.pipeline is not None else 1
    return len(splits), len(plan.stages), chunks, plan.microbatches


def simplest(plans: Sequence[PlanData]) -> PlanData:
    """The simplest of the plans that are nearly as quick as the quickest of them."""
    times = [simulated_s(plan) for plan in plans]
    near = [n for n, seconds in enumerate(times) if seconds <= (1 + NEARLY) * min(times)]
    return plans[min(near, key=lambda n: (complexity(plans[n]), times[n]))]
