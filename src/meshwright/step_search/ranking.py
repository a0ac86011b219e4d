"""Which of several plans of a step to take: the quickest as simulated, or a simpler one that is nearly as quick."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshwright.plans.plan import Compared, PlanData
from meshwright.simulator.simulate import simulate
from meshwright.simulator.simulated_step import SimulatedStep

_NUMBER = re.compile(r"\d+")
NEARLY = 0.01  # part of the step's time that a simpler plan may take longer
_WORTH_SAYING = 0.0005  # less is 0.0% as it is printed


def with_step(plan: PlanData, simulated: SimulatedStep | None = None) -> PlanData:
    """The plan with the time of its simulated step; on an abstract mesh, whose costs are no seconds, as it is.

    Args:
        plan: The plan.
        simulated: Its simulation, where there is one.
    """
    if plan.mesh.is_abstract or plan.cost.step:
        return plan
    step = simulate(plan) if simulated is None else simulated
    waiting = max(0.0, step.step_s - step.busy_s)  # both are sums in an order of their own, which round differently
    return replace(plan, cost=replace(plan.cost, step=step.step_s, waiting=waiting))


def complexity(plan: PlanData) -> tuple[int, int, int, int]:
    """What makes a plan harder to understand: distinct splits, most of all of like layers, stages, chunks, parts."""
    state = [tensor for tensor in plan.arguments if tensor.role in ("parameters", "optimizer")]
    splits = {(tensor.role, tensor.spec) for tensor in state}
    of_kinds = {(_NUMBER.sub("*", tensor.path), tensor.spec) for tensor in state}
    irregular = len(of_kinds) - len({path for path, _ in of_kinds})  # where layers of one kind are not split alike
    chunks = plan.pipeline.interleave if plan.pipeline is not None else 1
    return len(splits) + irregular, len(plan.stages), chunks, plan.microbatches


def simplest(plans: Sequence[PlanData]) -> PlanData:
    """The simplest of the plans that are nearly as quick as the quickest."""
    times = [plan.step_s for plan in plans]
    quickest = times.index(min(times))
    near = [n for n, seconds in enumerate(times) if seconds <= (1 + NEARLY) * times[quickest]]
    chosen = min(near, key=lambda n: (complexity(plans[n]), times[n]))
    return against(simpler(plans[chosen], plans[quickest]), [*plans[:chosen], *plans[chosen + 1 :]])


def simpler(plan: PlanData, quickest: PlanData) -> PlanData:
    """A plan that is taken since it is simpler than a quicker one, with what the last percent would have cost."""
    if plan.step_s <= (1 + _WORTH_SAYING) * quickest.step_s:
        return plan
    gain = _gain(quickest, 1 - quickest.step_s / plan.step_s)  # which may be said already, of the same two plans
    return replace(plan, remarks=tuple(dict.fromkeys((*plan.remarks, gain))))


def against(plan: PlanData, others: Iterable[PlanData], misfits: Iterable[Compared] = ()) -> PlanData:
    """A plan that is taken, with the others as what it was compared with: of those that decide alike, the quickest."""
    known = [*plan.compared, *misfits]
    for other in others:
        known += [_compared(other), *other.compared]
    quickest = dict[tuple[object, ...], Compared]()
    for one in sorted(known, key=lambda one: (one.step_s is None, one.step_s or 0.0)):
        quickest.setdefault((one.method, one.mesh, one.microbatches, one.recompute, one.num_stages), one)
    mine = replace(_compared(plan), method="")
    return replace(plan, compared=tuple(one for one in quickest.values() if replace(one, method="") != mine))


def _compared(plan: PlanData) -> Compared:
    pipeline = plan.pipeline
    return Compared(
        method=plan.method,
        mesh=tuple(plan.mesh.sizes),
        microbatches=plan.microbatches,
        recompute=plan.recompute if pipeline is None else pipeline.checkpoint,
        num_stages=len(plan.stages),
        step_s=plan.step_s,
        peak_bytes=plan.memory.peak_bytes,
    )


def _gain(quickest: PlanData, share: float) -> str:
    """What the last percent would have cost."""
    splits, stages, _, microbatches = complexity(quickest)
    what = [f"{splits} different splits of the state"]
    what += [f"{microbatches} microbatches"] if microbatches > 1 else []
    what += [f"{stages} stages"] if stages else []
    return f"A plan with {', '.join(what)} would be {share:.1%} quicker as simulated; this one is simpler."
