"""Bounds from below on the steps of other plans, from what the operations of one plan take."""

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from meshwright.cost.rates import cluster_rates
from meshwright.graph.phases import UPDATE
from meshwright.hardware import Cluster
from meshwright.pipeline.step_time import StageSeconds, step_s
from meshwright.plans.plan import PlanData
from meshwright.plans.stage import Pipeline
from meshwright.schedules import SCHEDULES
from meshwright.step_search.ranking import NEARLY

_NONE = 1e-9  # part of a product that takes no time besides what every product takes
_WEIGHTS = 1 / 3  # of a microbatch's time at most: no more than the forward pass, or the rest of the backward pass


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
        again_s: What is computed again in as many microbatches as the plan has.
        num_parts: The microbatches of the plan.
        is_spread: Whether its state is spread over all devices, so that in stages it takes no less of each.
    """

    fixed_s: float
    shared_s: float
    update_s: float
    again_s: float = 0.0
    num_parts: int = 1
    is_spread: bool = False

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
        return cls(fixed, shared, update, again, plan.microbatches, _is_spread(plan))

    def in_microbatches(self, count: int) -> float:
        """The compute of each device in so many microbatches without stages, with as much of it computed again."""
        return count * self.fixed_s + self.shared_s + self.update_s + self.again_s

    @property
    def busy_s(self) -> float:
        """The compute of each device if pipelines filled in no time, and nothing were computed again."""
        return self._parts_of_stage * self.fixed_s + self.shared_s + self.update_s

    @property
    def _parts_of_stage(self) -> int:
        """The fewest microbatches for each stage; one where memory does not say."""
        return self.num_parts if self.is_spread else 1

    def step_s(self, num_stages: int, num_microbatches: int, num_layers: int) -> float:
        """The least step of so many stages, by the best of the schedules that are searched."""
        fewest = self._parts_of_stage * num_stages
        if num_microbatches < fewest:  # in fewer than there are stages some always wait
            return np.inf
        own = self.fixed_s / num_stages + self.shared_s / num_microbatches
        own += self.again_s / num_microbatches if self.is_spread and num_microbatches == fewest else 0.0
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
