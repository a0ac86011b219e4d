"""The program of a plan whose batch is cut into microbatches: traced to be planned, and again to be run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from meshwright.graph import Traced, trace
from meshwright.hardware import Cluster
from meshwright.plans.plan import PlanData
from meshwright.runtime.microbatches.microbatches import accumulated


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
    args = traced.call.arguments.fill(traced.call.types)
    function = accumulated(traced.function, args, batch, count, traced.cluster, traced.call)
    parts = trace(wraps(traced.function)(function), *args, cluster=traced.cluster)
    whole = traced.graph
    graph = replace(parts.graph, donated=whole.donated, state=whole.state)
    graph = replace(graph, microbatches=count, batch_argnums=tuple(batch))
    return replace(parts, graph=graph, function=traced.function)


def traced_as_planned(plan: PlanData, traced: Traced) -> Traced:
    """A traced function, cut into microbatches as its plan says."""
    if plan.stages or plan.microbatches == traced.graph.microbatches:
        return traced
    return cut_traced(traced, plan.batch_argnums, plan.microbatches)


def cut_as_planned(
    plan: PlanData, function: Callable[..., Any], args: tuple[Any, ...], cluster: Cluster | None
) -> Callable[..., Any]:
    """A function of the whole batch, cut into microbatches as its plan says."""
    if plan.microbatches == 1:
        return function
    return wraps(function)(accumulated(function, args, plan.batch_argnums, plan.microbatches, cluster))
