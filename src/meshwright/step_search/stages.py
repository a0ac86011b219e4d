"""Stages as candidates of the default search: pipelines of equal stages, looked at where they may be quicker.

Stages send less than what splits tensors, but wait while the pipeline fills, and run each kernel once for each
microbatch. What they can save at most is the time in which the plan without stages waits, recomputes or repeats what
another device does, and often that is less than what filling takes: then nothing is priced. Otherwise the best recipe
of each number of stages is priced, as an expert would write it, and simulated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod

import numpy as np

from meshwright.cost.rates import cluster_rates
from meshwright.errors import DoesNotFit, ShardingError
from meshwright.graph import Traced
from meshwright.graph.phases import UPDATE
from meshwright.hardware import Cluster
from meshwright.hardware.torus import divisors
from meshwright.pipeline.planner import cut_layers, start_search
from meshwright.pipeline.prices.stage_problem import TENSOR
from meshwright.pipeline.search.search import PipelineSearch
from meshwright.pipeline.step_time import StageSeconds, step_s
from meshwright.pipeline.to_plan import describe
from meshwright.planner.budget import Budget
from meshwright.planner.methods import Auto, Method
from meshwright.planner.planner import Progress
from meshwright.planner.pricing.corrections import Corrections
from meshwright.planner.pricing.user_shardings import refuse_stages
from meshwright.plans.plan import PlanData
from meshwright.plans.stage import Pipeline
from meshwright.plans.stage_instructions import stage_instructions
from meshwright.runtime.stages.pipeline_program import why_not_cut
from meshwright.schedules import SCHEDULES
from meshwright.schedules.order import proven_order
from meshwright.step_search.microbatches import batch_size
from meshwright.step_search.ranking import NEARLY, against, simpler, with_step

_NONE = 1e-9  # part of a product that takes no time besides what every product takes
_WEIGHTS = 1 / 3  # of a microbatch's time at most: no more than the forward pass, or the rest of the backward pass


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


@dataclass(frozen=True)
class LeastStep:
    """Bounds from below on steps in stages, from what a plan's operations take in a step.

    A stage holds as many microbatches as there are stages, each of its part of the layers: together what a program of
    all layers holds of one microbatch with as many rows on each device. So where that program's state is spread over
    all devices, stages have no more room, and neither larger microbatches fit them nor ones of that size with less
    computed again: the search of one program has weighed the one against the other.

    Attributes:
        fixed_s: What the kernels of one pass through the whole model take however few its rows are.
        shared_s: The rest of the passes of the whole batch, shared evenly by all devices; nothing is computed again.
        update_s: What is done once a step, shared likewise.
        again_s: What is computed again where microbatches are as large as those of the plan.
        num_parts: The fewest microbatches for each stage; one where memory does not say.
    """

    fixed_s: float
    shared_s: float
    update_s: float
    again_s: float = 0.0
    num_parts: int = 1

    @classmethod
    def of(cls, plan: PlanData, cluster: Cluster) -> "LeastStep":
        """The bounds that a plan of one program gives."""
        rates, count = cluster_rates(cluster), cluster.num_devices
        fixed = shared = update = again = 0.0
        for op in plan.ops:
            load = op.load
            if load is None or load.over_host_link:
                continue
            whole = load.trips * rates.load_s(load)
            if load.recomputed:
                again += whole
                continue
            empty = replace(load, flops=_NONE * load.flops, num_bytes=0.0, fetches=0.0, special=0.0)
            started = load.trips * rates.load_s(empty)
            rest = (whole - started) * (load.num_parts or count) / count
            if op.phase == UPDATE:
                update += rest
            else:
                fixed, shared = fixed + started / plan.microbatches, shared + rest
        held = _is_spread(plan)
        return cls(fixed, shared, update, held * again, plan.microbatches if held else 1)

    @property
    def busy_s(self) -> float:
        """The compute of each device if pipelines filled in no time, and nothing were computed again."""
        return self.num_parts * self.fixed_s + self.shared_s + self.update_s

    def step_s(self, num_stages: int, num_microbatches: int, num_layers: int) -> float:
        """The least step of so many stages, by the best of the schedules that are searched."""
        if num_microbatches < self.num_parts * num_stages:  # in fewer than there are stages some always wait
            return np.inf
        own = self.fixed_s / num_stages + self.shared_s / num_microbatches
        own += self.again_s / num_microbatches if num_microbatches == self.num_parts * num_stages else 0.0
        each = [StageSeconds(own, _WEIGHTS * own, 0.0, self.update_s)] * num_stages
        forms = [("1f1b", 1)]
        if num_microbatches >= SCHEDULES["zb-h1"].full_from * num_stages:
            forms.append(("zb-h1", 1))
        if num_microbatches % num_stages == 0 and num_layers >= 2 * num_stages:
            forms.append(("interleaved", num_layers // num_stages))
        return min(step_s(Pipeline(name, num_microbatches, chunks, "none"), each)[0] for name, chunks in forms)


def _is_spread(plan: PlanData) -> bool:
    """Whether a plan's state is spread over all devices, so that in stages it takes no less of each."""
    sizes = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    state = [tensor for tensor in plan.arguments if tensor.role in ("parameters", "optimizer")]
    whole = sum(prod(tensor.shape) for tensor in state)
    held = sum(prod(tensor.shape) / prod(sizes[axis] for axes in tensor.spec for axis in axes) for tensor in state)
    return held * plan.mesh.num_devices <= (1 + NEARLY) * whole
