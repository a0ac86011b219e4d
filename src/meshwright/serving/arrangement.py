"""Which replicas of a model are on which devices, as a user says it or as a plan of serving chose it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.errors import ServingError
from meshwright.serving.planning.serving_plan import Replicas, ServingPlan
from meshwright.serving.planning.split import BYTES, Degrees
from meshwright.serving.planning.traffic import Traffic
from meshwright.serving.sizes import Sizes

#: Lengths that are compiled for caches that pass from engine to engine are so many times apart.
_APART = 4


@dataclass(frozen=True)
class ReplicaGroup:
    """Equal replicas.

    Attributes:
        count: How many.
        stages: Stages of layers in each; 0 for as few as it fits in.
        devices: Devices of each stage, or of each replica while nobody knows its stages; 0 for an equal share of all.
        split: How each is spread, as a plan of serving chose it; None for what was asked of the whole.
        sizes: What requests may use; None likewise.
    """

    count: int = 1
    stages: int = 0
    devices: int = 0
    split: Degrees | None = None
    sizes: Sizes | None = None

    @property
    def num_devices(self) -> int:
        """Devices of all of them."""
        return self.count * max(1, self.stages) * self.devices

    def staged(self) -> Iterator["ReplicaGroup"]:
        """The same with stages: with as many as are asked for, or with one, two and so on, as devices can be shared."""
        for stages in range(1, self.devices + 1) if not self.stages else ():
            if self.devices % stages == 0:
                yield replace(self, stages=stages, devices=self.devices // stages)
        if self.stages:
            yield self


def arranged(
    replicas: int | None,
    stages: int | None,
    apart: Sequence[int] | None,
    plan: ServingPlan | None,
    traffic: Traffic | None = None,
) -> tuple[ReplicaGroup, ...]:
    """The groups that a user asks for: one for everything, or one for prompts and one for answers.

    Args:
        replicas: Copies of the model.
        stages: Stages of layers in each.
        apart: Replicas for prompts and for answers, in place of `replicas`.
        plan: What chose all of this, in place of the others.
        traffic: A load for which it will be planned, in place of all.

    Raises:
        ServingError: Some of them contradict one another, or the plan is one that engines do not run.
    """
    for name, value in (("replicas", replicas), ("stages", stages)):
        if value is not None and (type(value) is not int or value < 1):
            raise ServingError(f"{name} is {value!r}; give a whole number from 1")
    if traffic is not None and not isinstance(traffic, Traffic):
        raise ServingError(f"traffic is {traffic!r:.60}; give mw.Traffic(rate=20, tokens_in=1000, tokens_out=300)")
    planned = "plan" if plan is not None else "traffic" if traffic is not None else ""
    if planned and not (replicas is stages is apart is None and (plan is None or traffic is None)):
        others = "replicas, stages, apart" + (" and traffic" if plan is not None else "")
        raise ServingError(f"{planned} says how many replicas and stages there are; leave out {others}")
    if plan is not None:
        if not isinstance(plan, ServingPlan):
            raise ServingError(f"plan is {plan!r:.60}; give what mw.plan_serving returns")
        return tuple(map(_planned, plan.chosen.groups))
    if apart is None:
        return (ReplicaGroup(replicas or 1, stages or 0),)
    counts = tuple(apart)
    if replicas is not None:
        raise ServingError("apart says how many replicas there are for prompts and for answers; leave out replicas")
    if len(counts) != 2 or any(type(count) is not int or count < 1 for count in counts):
        raise ServingError(f"apart is {apart!r}; give two whole numbers: replicas for prompts, and for answers")
    return tuple(ReplicaGroup(count, stages or 0) for count in counts)


def _planned(replicas: Replicas) -> ReplicaGroup:
    prices, limits = replicas.kind.prices, replicas.limits
    split, storage = prices.split, prices.storage
    if BYTES[storage.weights] < 2:
        raise ServingError(
            f"the plan keeps weights in {storage.weights}, and the engine keeps them in the dtype of the model; plan "
            "with weights of bfloat16"
        )
    small = storage.cache if BYTES[storage.cache] < 2 else None
    chunk = None if replicas.kind.role == "decode" else limits.chunk
    sizes = Sizes(max_len=limits.max_len, slots=limits.slots, chunk=chunk, cache_dtype=small)
    return ReplicaGroup(replicas.count, split.pipeline, split.num_devices // split.pipeline, split, sizes)


def shared_out(groups: Sequence[ReplicaGroup], devices: int) -> tuple[ReplicaGroup, ...]:
    """Groups whose replicas have devices: those they name, or equal shares of all there are."""
    groups = tuple(groups) or (ReplicaGroup(),)
    parts = sum(group.count * max(1, group.stages) for group in groups)
    share, left = divmod(devices, parts)
    if any(not group.devices for group in groups) and (left or not share):
        named = "stages of replicas" if any(group.stages > 1 for group in groups) else "replicas"
        raise ServingError(
            f"{parts} {named} cannot share {devices} devices evenly; give numbers whose product divides it"
        )
    return tuple(replace(group, devices=group.devices or share) for group in groups)


def transfer_lengths(longest: int) -> tuple[int, ...]:
    """The lengths of caches that are compiled to pass from engine to engine.

    >>> transfer_lengths(2000)
    (125, 500, 2000)
    """
    return tuple(sorted({max(1, longest // _APART**power) for power in range(3)}))
