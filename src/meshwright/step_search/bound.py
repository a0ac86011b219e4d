"""A bound on all plans of a step as one program, whatever they recompute and however many microbatches they have.

The solver's bound is one on plans of the same program, which computes again what this one does in as many microbatches.
Every other program of the step, too, computes the products of the step as it was written. A product takes no less than
on all devices in even shares and as few kernels as possible, by which its fixed time is paid once. Nothing else is
counted: what is computed again may spare other operations their memory traffic, and even communication.
"""

from dataclasses import replace

from meshwright.cost.load import Load
from meshwright.cost.rates import cluster_rates
from meshwright.graph.phases import UPDATE
from meshwright.plans.plan import PlanData


def with_bound(plan: PlanData) -> PlanData:
    """A plan with the bound on what else could be recomputed, and on other microbatches; where costs are seconds."""
    if plan.mesh.cluster is None or plan.stages or "calibration" in plan.provenance:
        return plan
    rates, seconds = cluster_rates(plan.mesh.cluster), 0.0
    for op in plan.ops:
        if op.load is not None and op.load.flops and not op.load.recomputed:
            count = 1 if op.phase == UPDATE else plan.microbatches
            seconds += op.load.trips / count * rates.load_s(_even(op.load, count, plan.mesh.num_devices))
    bound = min(seconds, plan.solution.lower_bound)
    return replace(plan, solution=replace(plan.solution, of_any_program=bound))


def _even(load: Load, count: int, num_devices: int) -> Load:
    """A product of the whole batch, in even shares of all devices and with nothing that slows its kernel."""
    flops = load.flops * count * (load.num_parts or num_devices) / num_devices
    return replace(load, flops=flops, num_bytes=0.0, fetches=0.0, aligned=1.0, useful=1.0)
