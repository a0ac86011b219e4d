"""Decides what the backward pass computes again, with the microbatches: the least work that the memory allows.

Both save memory, so they are chosen together. A plan without recomputation and without a memory limit says what every
kind of layer may keep, and what it takes to compute the rest (`layer_kinds.py`); for each number of microbatches a
small exact problem then says what to keep (`keeping.py`). What it promises is planned under the limit, the quickest
first, until none promises to be quicker than the best; a plan that does not fit, or leaves room, corrects the promises.
Where devices are several and the search is free, this is done by fully sharded data parallelism, which is planned in a
fraction of the time, and the policy that is best by it is searched with, unless devices compute all the time by it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from math import gcd, inf
from typing import NamedTuple

from meshwright.errors import DoesNotFit, ShardingError
from meshwright.graph import Traced
from meshwright.graph.phases import BACKWARD, PHASES
from meshwright.hardware import Mesh
from meshwright.planner.methods import AUTO, Auto, Method, Zero
from meshwright.planner.planner import Progress
from meshwright.plans.plan import PlanData
from meshwright.runtime.microbatches.cut_operations import CannotCut
from meshwright.runtime.microbatches.planned_parts import cut_traced, recomputing
from meshwright.runtime.recomputation.policies import AS_WRITTEN, FULL, NONE, OFFLOAD, SELECTIVE, uses_host
from meshwright.runtime.recomputation.recomputed import regions_of
from meshwright.step_search import microbatches
from meshwright.step_search.keeping import Keeping
from meshwright.step_search.layer_kinds import Figures, LayerKind
from meshwright.step_search.promises import Promise, Promises
from meshwright.step_search.ranking import simplest, with_step
from meshwright.units import format_bytes

_MOST_PLANS = 6  # by which promises are corrected
_MOST_CUT = 4  # steps in microbatches that are kept, since another method may plan them, too


def decided(
    traced: Traced,
    batch: Sequence[int] | None,
    method: Method,
    meshes: Sequence[Mesh],
    solve: microbatches.Solve,
    say: Progress,
    on_host_within: float | None = None,
) -> PlanData:
    """The plan of a step as one program, with the recomputation and the microbatches that its method says or are best.

    Args:
        traced: The step as it was written, with its whole batch.
        batch: Positions of the arguments that are the batch; None for those that look like it.
        method: The method.
        meshes: The views that it tries.
        solve: Makes the plan of a traced step by a method.
        say: Called with each stage.
        on_host_within: Bytes that a plan may take of a device, where no other plan fits and what layers hand on may be
            kept on the host: copies take longer than anything else that saves as much memory.

    Raises:
        DoesNotFit: No plan fits, with any recomputation and number of microbatches.
        ShardingError: The batch does not divide into as many parts as the method says.
    """

    changed = cache(partial(recomputing, traced))

    @lru_cache(maxsize=_MOST_CUT)
    def cut_as(policy: str, positions: tuple[int, ...], count: int) -> Traced:
        return cut_traced(changed(policy), positions, count)

    def cut(traced: Traced, positions: Sequence[int], count: int) -> Traced:
        return cut_as(traced.graph.recompute, tuple(positions), count)

    def planned(policy: str, by: Method = method, counts: Sequence[int] | None = None) -> PlanData:
        return with_step(microbatches.decided(changed(policy), batch, by, meshes, solve, say, cut, counts))

    if method.recompute != AUTO:
        _check_host(method.recompute, meshes[0])
        _check_share(method.recompute, changed(method.recompute))
        return _fits_host(planned(method.recompute))
    has_backward = bool((traced.graph.columns.phase == PHASES.index(BACKWARD)).any())
    if not has_backward or (isinstance(method, Auto) and method.profile):
        return planned(AS_WRITTEN)
    has_checkpoints = any(operation.is_checkpoint for operation in traced.call.program.walk())
    least = NONE if has_checkpoints else AS_WRITTEN
    if on_host_within is None and not _may_be_short(traced, meshes[0], method):
        with suppress(DoesNotFit):  # which is not impossible: what does not divide is whole on every device
            return planned(least)
    if meshes[0].cluster is None:
        return _first_that_fits((least, SELECTIVE, AS_WRITTEN if has_checkpoints else FULL), planned)
    positions = microbatches.batch_argnums(traced) if batch is None else batch

    def unlimited(policy: str, by: Method, count: int) -> PlanData:
        parts = changed(policy) if count == 1 else cut_as(policy, tuple(positions), count)
        return solve(parts, by, limited=False)

    search = _Search(traced, positions, least, has_checkpoints, meshes, planned, unlimited, say, on_host_within)
    if not microbatches.is_free(method) or meshes[0].num_devices == 1:
        return search.best(method).plan
    fsdp = Zero(3, memory_fraction=method.memory_fraction, seconds=method.seconds, microbatches=method.microbatches)
    try:
        best = search.best(fsdp)
    except (DoesNotFit, ShardingError):  # by this method: the batch may not divide into as many parts as devices
        return search.best(method).plan
    plans = [replace(best.plan, method=method.name)]
    if microbatches.computes_all_the_time(plans[0]):
        return _as_good_as_any(plans[0])
    counts = microbatches.divisors(microbatches.batch_size(traced, positions))
    if microbatches.repeats_nothing(plans[0]):  # what is split over all devices holds the least: fewer do not fit
        counts = [count for count in counts if count >= plans[0].microbatches]
    with suppress(DoesNotFit):
        plan = _fits_host(planned(best.plan.recompute, counts=counts))
        plans.append(replace(plan, remarks=(*best.remarks, *plan.remarks)))
    return simplest(plans)


def _as_good_as_any(plan: PlanData) -> PlanData:
    """A plan of a search that ended since devices compute nearly all the time."""
    share = plan.cost.waiting / plan.step_s
    said = f"Not all splits were looked for: devices wait for {share:.1%} of the step, the most that others could save."
    return replace(plan, remarks=(*plan.remarks, said))


def _check_share(word: str, traced: Traced) -> None:
    """Refuses a part of the layers where none run one after the other, of which a part could be computed again."""
    kind, colon, _ = word.partition(":")
    if colon and not any(operation.is_checkpoint for operation in traced.call.program.walk()):
        raise ShardingError(
            f"recompute is {word!r}, and this step has no layers that run one after the other: all trips of a loop are "
            f"alike; give {kind!r}"
        )


def _check_host(word: str, mesh: Mesh) -> None:
    """Refuses to keep results on the host for devices that compute there."""
    if uses_host(word) and mesh.is_cpu:
        raise ShardingError(
            f"recompute is {word!r}, and these devices compute in the memory of their host, so that nothing is saved "
            f"by keeping results there; give {FULL!r}"
        )


def may_use_host(method: Method, mesh: Mesh) -> bool:
    """Whether a method may keep on the host what no device has room for."""
    return method.recompute == AUTO and not method.staged and mesh.cluster is not None and not mesh.is_cpu


def _host_room(plan: PlanData) -> float:
    """Bytes of the host's memory that each device may fill."""
    return (0 if plan.mesh.chip is None else plan.mesh.chip.host_memory_bytes) or inf


def _fits_host(plan: PlanData) -> PlanData:
    """Refuses a plan that keeps more on the hosts than they hold, where the cluster says how much that is."""
    room = _host_room(plan)
    if plan.memory.host_bytes > room:
        raise DoesNotFit(
            f"the plan keeps {format_bytes(plan.memory.host_bytes)} of each device on its host, which has "
            f"{format_bytes(room)} for each: give recompute={FULL!r}, or more microbatches",
            needed_bytes=plan.memory.host_bytes,
            limit_bytes=int(room),
        )
    return plan


def _may_be_short(traced: Traced, mesh: Mesh, method: Method) -> bool:
    """Whether memory is likely short: not where all devices together could hold every value that is ever computed."""
    if mesh.memory_bytes is None:
        return False
    limit = mesh.memory_bytes * (1.0 if mesh.is_abstract else method.memory_fraction)
    return bool(traced.graph.num_bytes.sum() > limit * mesh.num_devices)


def _first_that_fits(policies: Sequence[str], planned: Callable[[str], PlanData]) -> PlanData:
    """The plan of the first policy that fits, from the least work to the least memory."""
    misfits: list[DoesNotFit] = []
    for policy in policies:
        try:
            return planned(policy)
        except DoesNotFit as error:
            misfits.append(error)
    raise min(misfits, key=lambda error: error.needed_bytes)


class _Best(NamedTuple):
    """The best plan, and what recomputation saves and costs in it."""

    plan: PlanData
    remarks: tuple[str, ...]


def spread_alike(counts: Sequence[int], size: int, num_devices: int) -> list[int]:
    """The numbers of microbatches whose rows are spread over as many devices as those of the whole batch can be.

    In others a device has as many rows as in fewer microbatches, and devices repeat one another's work.

    >>> spread_alike([1, 2, 3, 4, 6], 1536, 1024)
    [1, 3]
    """
    return [count for count in counts if gcd(size // count, num_devices) == gcd(size, num_devices)]


@dataclass(frozen=True)
class _Search:
    """Looks for the policy and the number of microbatches with which a method's plan is quickest.

    Attributes:
        traced: The step as it was written.
        positions: Positions of the arguments that are the batch.
        least: The policy by which nothing is computed again.
        has_checkpoints: Whether the step has its own, which are one more policy.
        meshes: The views that the search tries.
        planned: Makes a plan with a policy by a method, in one of some numbers of microbatches.
        unlimited: Makes one in some microbatches, with as much memory as it takes; its step is not simulated.
        say: Called with each stage.
        on_host_within: As in `decided`.
    """

    traced: Traced
    positions: Sequence[int]
    least: str
    has_checkpoints: bool
    meshes: Sequence[Mesh]
    planned: Callable[..., PlanData]
    unlimited: Callable[[str, Method, int], PlanData]
    say: Progress
    on_host_within: float | None

    def best(self, method: Method) -> _Best:
        """The best plan by a method.

        Raises:
            DoesNotFit: None fits.
            ShardingError: The batch does not divide as the method says.
        """
        if self.on_host_within is not None:
            return self._best_on_host(method, self.on_host_within)
        self.say(f"{method.name} without recomputation")
        misfits: list[DoesNotFit] = []
        plans: list[PlanData] = []
        counts = self._counts(method)

        def added(policy: str, counts: Sequence[int] | None = None) -> PlanData | None:
            try:
                plans.append(self.planned(policy, method, counts))
            except DoesNotFit as error:
                misfits.append(error)
                return None
            return plans[-1]

        whole = added(self.least, counts)
        if whole is not None and whole.microbatches in (1, method.microbatches):
            return _Best(whole, ())  # nothing is gained by computing it again
        limit = misfits[-1].limit_bytes if whole is None else whole.memory.limit_bytes
        assert limit is not None, "a plan in microbatches that were not asked for has a limit"
        promises = self._promises(method, whole, limit)
        if promises is not None:
            plans += self._looked_into(promises, method)
        if self.has_checkpoints:  # what its layers keep is promised, but not what it computes again beside them
            added(AS_WRITTEN, counts)
        if not plans:  # in any number of microbatches, though devices may repeat one another's work
            added(FULL)
        if not plans:
            raise min(misfits, key=lambda error: error.needed_bytes)
        best = simplest(plans)
        remarks = () if promises is None or best is whole else promises.remarks(best)
        return _Best(replace(best, remarks=(*remarks, *best.remarks)), remarks)

    def _best_on_host(self, method: Method, limit: float) -> _Best:
        """The best plan by a method that keeps results on the host, where none fits that does not."""
        promises = self._promises(method, None, limit)
        plans = [] if promises is None else self._looked_into(promises, method)
        if promises is None or not plans:
            return _Best(_fits_host(self.planned(OFFLOAD, method)), ())
        best = simplest(plans)
        remarks = promises.remarks(best)
        return _Best(replace(best, remarks=(*remarks, *best.remarks)), remarks)

    def _promises(self, method: Method, whole: PlanData | None, limit: float) -> Promises | None:
        """What may be expected of policies; None where the step has no layers that could be computed again.

        Args:
            method: The method.
            whole: A plan without recomputation that fits; None where none does.
            limit: Bytes that a plan may take.
        """
        reference = with_step(self.unlimited(self.least, method, 1))
        assert reference.origin is not None
        regions = regions_of(reference.origin.call.program)
        if not regions:
            return None
        figures = Figures(reference, self.on_host_within is not None)
        keeping = Keeping([LayerKind(one, n, figures) for one in regions for n in range(one.layers.num_kinds)])
        if isinstance(method.microbatches, int):
            return Promises(keeping, reference, [method.microbatches], limit, whole)
        counts = self._counts(method)
        if whole is not None:
            counts = [count for count in counts if count <= whole.microbatches]
        if whole is None and len(counts) > 1 and not self._may_be_cut(counts[-1]):
            counts = [1]
        return Promises(keeping, reference, counts, limit, whole)

    def _counts(self, method: Method) -> list[int]:
        """The numbers of microbatches to choose from: those that a method spreads over as many devices as the batch.

        In others devices repeat one another's work, which takes longer than to compute everything again.
        """
        size = microbatches.batch_size(self.traced, self.positions)
        counts = microbatches.divisors(size)
        return spread_alike(counts, size, self.meshes[0].num_devices) if method.spreads_batch and size else counts

    def _may_be_cut(self, count: int) -> bool:
        try:
            cut_traced(self.traced, self.positions, count)
        except CannotCut:
            return False
        return True

    def _looked_into(self, promises: Promises, method: Method) -> list[PlanData]:
        """Plans of what is promised that fit, the quickest promise first."""
        plans: list[PlanData] = []
        for _ in range(_MOST_PLANS):
            promise = promises.next()
            if promise is None:
                break
            self.say(f"{method.name} in {promise.num_parts} microbatches, recomputation {promise.kept.policy:.40}")
            try:
                plan = self._kept(promise, method)
            except DoesNotFit as error:
                promises.learn(promise, error.needed_bytes)
                continue
            except ShardingError:  # so small a part of the batch does not divide among the devices
                promises.learn(promise, inf)
                continue
            if plan.memory.host_bytes > _host_room(plan):
                promises.learn(promise, inf)
            elif plan.memory.peak_bytes > promises.limit:
                promises.learn(promise, plan.memory.peak_bytes)
            else:
                plan = with_step(replace(plan, memory=replace(plan.memory, limit_bytes=round(promises.limit))))
                promises.learn(promise, plan.memory.peak_bytes, plan.step_s)
                plans.append(plan)
        return plans

    def _kept(self, promise: Promise, method: Method) -> PlanData:
        """The plan that keeps a promise; of a method that fixes most splits, without a memory limit.

        Under one such a method's other splits are bent, into plans that fit and are far slower than another policy's.
        """
        policy, count = promise.kept.policy, promise.num_parts
        if isinstance(method, Auto) and self.meshes[0].num_devices > 1:
            return self.planned(policy, replace(method, microbatches=count))
        return self.unlimited(policy, method, count)
