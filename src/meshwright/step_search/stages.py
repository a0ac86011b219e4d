"""Stages as candidates of the default search: pipelines of equal stages, looked at where they may be quicker.

Stages send less than what splits tensors, but wait while the pipeline fills, and run each kernel once for each
microbatch. What they can save at most is the time in which the plan without stages waits, recomputes or repeats what
another device does, and often that is less than what filling takes: then nothing is priced. Otherwise the best recipe
of each number of stages is priced, as an expert would write it, and simulated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from meshwright.errors import DoesNotFit, ShardingError
from meshwright.graph import Traced
from meshwright.hardware import Cluster
from meshwright.hardware.torus import divisors
from meshwright.pipeline.planner import cut_layers, start_search
from meshwright.pipeline.prices.stage_problem import TENSOR
from meshwright.pipeline.search.search import PipelineSearch
from meshwright.pipeline.to_plan import describe
from meshwright.planner.budget import Budget
from meshwright.planner.methods import Auto, Method
from meshwright.planner.planner import Progress
from meshwright.planner.pricing.corrections import Corrections
from meshwright.planner.pricing.user_shardings import refuse_stages
from meshwright.plans.plan import PlanData
from meshwright.plans.stage_instructions import stage_instructions
from meshwright.runtime.stages.pipeline_program import why_not_cut
from meshwright.schedules.order import proven_order
from meshwright.step_search.least_step import LeastStep
from meshwright.step_search.microbatches import batch_size
from meshwright.step_search.ranking import NEARLY, against, simpler, with_step


def or_stages(
    plan: PlanData,
    traced: Traced,
    cluster: Cluster,
    method: Method,
    batch: Sequence[int],
    say: Progress,
    budget: Budget,
    known: Corrections,
) -> PlanData:
    """A plan of one program, or one in stages where that is quicker by more than stages are worth.

    Args:
        plan: The best plan of one program, with its simulated step.
        traced: The step as it was written.
        cluster: The machines.
        method: The method, which may allow stages.
        batch: Positions of the arguments that are the batch.
        say: Called with each stage of the search.
        budget: The time that is left.
        known: What is known of the memory of its stages.
    """
    may_be = isinstance(method, Auto) and method.may_be_staged and traced.graph.state and plan.ops
    if not may_be or cluster.num_devices == 1 or plan.mesh.is_cpu or (budget.seconds is not None and budget.is_over):
        return plan
    try:
        staged = sorted(_recipes(plan, traced, cluster, method, batch, say, budget, known), key=lambda one: one.step_s)
        while staged and staged[0].step_s < plan.step_s and not _runs(staged[0], traced, batch):
            del staged[0]
    except (DoesNotFit, ShardingError):  # the step has no layers, or sizes that stages do not allow
        return plan
    best = staged[0] if staged else plan
    if best.step_s >= (1 - NEARLY) * plan.step_s:
        return against(simpler(plan, best), staged)
    said = (
        f"It runs in stages: the best plan without any takes {plan.step_s / best.step_s - 1:.1%} longer, as simulated."
    )
    best = against(best, [plan, *(one for one in staged if one is not best)])
    return replace(best, remarks=(said, *best.remarks))


def _recipes(
    plan: PlanData,
    traced: Traced,
    cluster: Cluster,
    method: Method,
    batch: Sequence[int],
    say: Progress,
    budget: Budget,
    known: Corrections,
) -> Iterator[PlanData]:
    """The best recipe of each number of stages that may be quicker, as a plan with its simulated step."""
    size, wanted_s = batch_size(traced, batch), (1 - NEARLY) * plan.step_s
    least = LeastStep.of(plan, cluster)
    if not size or least.busy_s >= wanted_s:
        return
    refuse_stages(traced.graph)
    layers = cut_layers(traced, method, say)
    num_layers = layers[1].num_layers
    bounds = {
        (stages, count): bound_s
        for stages in divisors(cluster.num_devices)
        if 1 < stages <= num_layers
        for count in divisors(size)
        if (bound_s := least.step_s(stages, count, num_layers)) < wanted_s
    }
    if not bounds:
        return
    search = start_search(traced, cluster, method, say, budget, known, layers)
    search.beat_s = plan.cost.total  # stages are priced as it is: with nothing beside anything else
    slower = cache(partial(_slower, search))
    say("looking for stages that are quicker")
    for stages in sorted({stages for stages, _ in bounds}):

        def is_worth(tensor: int, count: int, stages: int = stages) -> bool:
            return bounds.get((stages, count), np.inf) * slower(tensor) < wanted_s

        if search.best_recipe(stages, is_worth) is not None:
            yield with_step(describe(search, traced, method, 0.0))


def _runs(plan: PlanData, traced: Traced, batch: Sequence[int]) -> bool:
    """Whether a step can run in the stages of a plan; this cuts it, so only plans that may be taken are asked."""
    proven_order(stage_instructions(plan))
    return not why_not_cut(plan, traced, batch)


def _slower(search: PipelineSearch, tensor: int) -> float:
    """How many times as long a step takes at least where each stage splits weights over so many devices."""
    if tensor == 1:
        return 1.0
    alone, split = (search.catalogue.least_s(0, (n,), TENSOR) for n in (1, tensor))
    return max(split / alone, 1.0) if alone else 1.0
