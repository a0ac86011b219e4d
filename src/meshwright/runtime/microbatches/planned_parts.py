"""The program of a plan that changes the user's: in microbatches, or with another recomputation; planned, then run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from meshwright.graph import Traced
from meshwright.graph.tracing.call import Call, call_abstractly
from meshwright.graph.tracing.garbage import collector_paused
from meshwright.graph.tracing.trace import of_call
from meshwright.hardware import Cluster
from meshwright.plans.plan import PlanData
from meshwright.program.numbering import Changed
from meshwright.rules.base import GIVEN
from meshwright.runtime.microbatches.microbatches import in_microbatches
from meshwright.runtime.recomputation.policies import AS_WRITTEN
from meshwright.runtime.recomputation.recomputed import recomputed


def cut_traced(traced: Traced, batch: Sequence[int], count: int) -> Traced:
    """A traced step with its batch cut into parts; its function stays that of the whole batch.

    Args:
        traced: The step.
        batch: Positions of the arguments whose leaves are examples stacked along their first dim.
        count: The number of parts.

    Raises:
        ShardingError: The batch does not divide into so many parts.
        CannotCut: The numbers would change.
    """
    with collector_paused():
        parts = _of_changed(traced, in_microbatches(traced.call, batch, count, traced.cluster))
    graph = replace(parts.graph, microbatches=count, batch_argnums=tuple(batch), recompute=traced.graph.recompute)
    return replace(parts, graph=graph)


def traced_as_planned(plan: PlanData, traced: Traced) -> Traced:
    """A traced function, changed as its plan says."""
    if plan.stages:
        return traced
    if plan.recompute != traced.graph.recompute:
        traced = recomputing(traced, plan.recompute)
    if plan.microbatches == traced.graph.microbatches:
        return traced
    return cut_traced(traced, plan.batch_argnums, plan.microbatches)


def recomputing(traced: Traced, word: str) -> Traced:
    """A traced step that computes again what a policy does not keep; its function stays as it was written.

    Args:
        traced: The step.
        word: A word of `runtime.recomputation.policies`; ``as written`` changes nothing.
    """
    if word == AS_WRITTEN:
        return traced
    with collector_paused():
        new = _of_changed(traced, recomputed(traced.call.program, word))
    return replace(new, graph=replace(new.graph, recompute=word))


def _of_changed(traced: Traced, changed: Changed) -> Traced:
    """A traced step of which a pass has made another program: its state and its loops are what they were."""
    trips = {loop.id: loop.trips for loop in traced.graph.whiles if loop.known == GIVEN}
    seen = {new: trips[old] for new, old in changed.former.items() if old in trips}
    call = replace(traced.call, program=changed.program)
    new = of_call(call, traced.function, traced.cluster, traced.given, seen)
    graph = replace(new.graph, donated=traced.graph.donated, state=traced.graph.state)
    return replace(new, graph=graph, given=traced.given, written=traced.written or traced.graph)


def call_as_planned(
    plan: PlanData, function: Callable[..., Any], args: tuple[Any, ...], cluster: Cluster | None
) -> Call:
    """A function of the whole batch as JAX sees it, changed as its plan says."""
    call = call_abstractly(function, args, cluster)
    if plan.recompute != AS_WRITTEN:
        call = replace(call, program=recomputed(call.program, plan.recompute).program)
    if plan.microbatches == 1:
        return call
    return replace(call, program=in_microbatches(call, plan.batch_argnums, plan.microbatches, cluster).program)
