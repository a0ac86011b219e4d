"""The time of a step from the times of a plan's stages: the same sum as in `equal_stages.price_recipe`."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.plans.stage import Pipeline, Stage
from meshwright.schedules import find_schedule


class StageSeconds(NamedTuple):
    """Seconds of a stage.

    Attributes:
        own: One microbatch, forward and backward.
        weights: The part of ``own`` that computes gradients of weights, as far as other stages can fill it.
        sent: Sending one microbatch on and receiving its gradient.
        once: The work done once a step.
    """

    own: float
    weights: float
    sent: float
    once: float


def seconds_of(stage: Stage) -> StageSeconds:
    """A stage's times."""
    weights = stage.weights_fraction * stage.backward.compute_s
    rest = stage.backward.total_s + stage.recompute.total_s - weights
    weights = min(weights, stage.forward.total_s, rest)
    return StageSeconds(stage.microbatch_s, weights, 2 * stage.transfer_s * len(stage.chunks), stage.once_s)


def step_s(pipeline: Pipeline, stages: Sequence[StageSeconds]) -> tuple[float, int]:
    """The time of a step, and the number of the stage that is busiest in it."""
    many, chunks = pipeline.num_microbatches, pipeline.interleave
    schedule = find_schedule(pipeline.schedule, len(stages), many, chunks)
    full = many >= schedule.full_from * len(stages)
    fills = [schedule.fill(s.own, 0.0, s.weights, chunks) if full else s.own for s in stages]
    added = sum(fill + s.sent / chunks for fill, s in zip(fills, stages, strict=True))
    busy = [(many - 1) * max(s.own, s.sent) + s.own - fill + s.once for fill, s in zip(fills, stages, strict=True)]
    return added + max(busy), busy.index(max(busy))
