"""Decides into how many microbatches a batch is cut: the fewest that fit, or more where the step is quicker by them.

With fewer microbatches parameters are gathered less often and kernels are larger; with more of them less memory is
taken, which leaves the choice among quicker splits. Plans are made for a few numbers of microbatches, from a lower
bound on the memory upwards, and the quickest as simulated is kept; of plans that are nearly as quick, the simplest.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

import numpy as np

from meshwright.errors import DoesNotFit
from meshwright.graph import Traced
from meshwright.hardware import Mesh
from meshwright.planner.grouping.roles import find_roles
from meshwright.planner.methods import AUTO, Auto, Method
from meshwright.planner.planner import Progress, Task
from meshwright.plans.plan import Compared, Considered, PlanData
from meshwright.runtime.microbatches.cut_operations import CannotCut
from meshwright.runtime.microbatches.planned_parts import cut_traced
from meshwright.step_search.least_step import LeastStep
from meshwright.step_search.ranking import NEARLY, against, simplest, with_step

Cut = Callable[[Traced, Sequence[int], int], Traced]
log = logging.getLogger("meshwright")

_BINDS = 1.02  # times the cost without a memory limit: from here more microbatches may leave room for a quicker split
_TIGHT = 0.7  # of the memory limit: a plan that takes less of it is not held by it
_NEAR = 1.25  # times the limit: what an estimate of memory may be wrong by


class Solve(Protocol):
    """Plans steps as one program."""

    def __call__(self, traced: Traced, method: Method, limited: bool = True, fewer: PlanData | None = None) -> PlanData:
        """The plan of a traced step by a method, under the memory limit or not; `fewer` as in `best_plan`."""

    def task(self, traced: Traced, method: Method) -> tuple[Task, list[Mesh]]:
        """What is to be planned, and the meshes to try."""


def decided(
    traced: Traced,
    batch: Sequence[int] | None,
    method: Method,
    meshes: Sequence[Mesh],
    solve: Solve,
    say: Progress,
    cut: Cut = cut_traced,
    counts: Sequence[int] | None = None,
) -> PlanData:
    """The plan of a step as one program, with as many microbatches as its method says or as are best.

    Args:
        traced: The step, with its whole batch.
        batch: Positions of the arguments that are the batch; None for those that look like it.
        method: The method.
        meshes: The views that it tries.
        solve: Makes the plan of a traced step by a method.
        say: Called with each stage.
        cut: Cuts a traced step's batch into parts.
        counts: The numbers of microbatches to choose from where the method does not say; by default all that divide.

    Raises:
        DoesNotFit: No plan fits, with any of these numbers of microbatches.
        ShardingError: The batch does not divide into as many parts as the method says.
    """
    positions = batch_argnums(traced) if batch is None else tuple(batch)
    if (
        method.microbatches == AUTO and isinstance(method, Auto) and method.profile
    ):  # measured once, not for each number
        modelled = _Search(traced, positions, replace(method, profile=False), meshes, solve, say, cut, counts).best()
        method = replace(method, microbatches=modelled.microbatches)
    elif method.microbatches == AUTO:
        return _Search(traced, positions, method, meshes, solve, say, cut, counts).best()
    assert isinstance(method.microbatches, int)
    if method.microbatches == 1:
        return solve(traced, method)
    try:
        return solve(cut(traced, positions, method.microbatches), method)
    except CannotCut as reason:
        remark = (
            f"runs its batch whole instead of in {method.microbatches} microbatches, which could change its numbers"
        )
        log.warning("%s: %s: %s", getattr(traced.function, "__name__", "the step"), remark, reason)
        found = solve(traced, method)
        return replace(found, remarks=(f"The step {remark}: {reason}.", *found.remarks))


def is_free(method: Method) -> bool:
    """Whether a method fixes no sharding and no mesh, so that those of others may be tried beside its own."""
    return isinstance(method, Auto) and replace(method, pipeline=AUTO, recompute=AUTO, microbatches=AUTO).may_be_staged


def batch_argnums(traced: Traced) -> tuple[int, ...]:
    """The arguments of data that are stacks of as many examples as the first one; none where no state is returned."""
    graph, arguments = traced.graph, traced.call.arguments
    data, first = set(find_roles(graph).data), 0
    sizes: dict[int, set[int]] = {}
    for number, child in enumerate(arguments.tree.children()):
        places = arguments.positions[first : first + child.num_leaves]
        first += child.num_leaves
        values = [graph.inputs[place] for place in places if place is not None]
        shapes = [graph.types[value].shape for value in values]
        if graph.state and data.issuperset(values) and any(shapes):
            sizes[number] = {shape[0] for shape in shapes if shape}
    return tuple(number for number, found in sizes.items() if found == next(iter(sizes.values())))


def batch_size(traced: Traced, positions: Sequence[int]) -> int:
    """The number of examples; 0 where the arguments are no stacks of the same examples."""
    import jax

    args = traced.call.arguments.fill(traced.call.types)
    leaves = [x for number in positions if number < len(args) for x in jax.tree_util.tree_leaves(args[number])]
    sizes = {x.shape[0] for x in leaves if getattr(x, "shape", ())}
    return int(sizes.pop()) if len(sizes) == 1 else 0


@dataclass(frozen=True)
class _Search:
    traced: Traced
    positions: tuple[int, ...]
    method: Method
    meshes: Sequence[Mesh]
    solve: Solve
    say: Progress
    cut: Cut
    counts: Sequence[int] | None

    def best(self) -> PlanData:
        """The plan with the best number of microbatches."""
        counts = divisors(batch_size(self.traced, self.positions)) if self.counts is None else self.counts
        plans: list[PlanData] = []
        misfits: list[Compared] = []
        count, method = self._least_count(counts, misfits), self.method
        while count:
            try:
                found = self._plan(count, method, plans[-1] if plans else None)
            except DoesNotFit as error:
                if plans:
                    break
                misfits.append(self._misfit(count, error.needed_bytes))
                following = self._after_misfit(error, count, counts)
                if not following:
                    raise _said(error, count) from None
            except CannotCut as reason:
                if plans:
                    break
                raise self._uncut(reason) from None
            else:
                found = with_step(found)
                quickest = min([plan.step_s for plan in plans], default=np.inf)
                held = self._is_held(found) and found.step_s <= quickest
                plans.append(found)
                following = _following(counts, 2 * count) if held else 0
                method = self._on_views_of(found)
            count = following
        return against(simplest(plans), (), misfits)

    def _least_count(self, counts: Sequence[int], misfits: list[Compared]) -> int:
        """The fewest microbatches with which a plan may fit: all devices together hold every live value once.

        Where that is more than one, what one would need is added to what does not fit.

        Raises:
            DoesNotFit: It is more than those to choose from.
        """
        limit = self.meshes[0].memory_bytes
        if limit is None or (len(counts) < 2 and self.counts is None):
            return counts[0]
        room = limit * self.meshes[0].num_devices
        task, _ = self.solve.task(self.traced, self.method)
        live, arguments = task.live_bytes, task.argument_bytes
        if live <= room or arguments >= room:
            return counts[0]
        misfits.append(self._misfit(1, live / self.meshes[0].num_devices))
        least = ceil((live - arguments) / (room - arguments))
        if self.counts is not None and least > counts[-1]:
            raise DoesNotFit(
                f"all devices together have no room for what {counts[-1]} microbatches hold",
                needed_bytes=misfits[0].peak_bytes,
                limit_bytes=int(limit * self.method.memory_fraction),
            )
        return _following(counts, least) or counts[-1]

    def _misfit(self, count: int, needed_bytes: float) -> Compared:
        shape, policy = tuple(self.meshes[0].sizes), self.traced.graph.recompute
        return Compared(self.method.name, shape, count, policy, 0, None, round(needed_bytes))

    def _plan(self, count: int, method: Method, fewer: PlanData | None) -> PlanData:
        """The plan with so many microbatches, beside one with fewer of them."""
        if count == 1:
            return self.solve(self.traced, method)
        self.say(f"cutting the batch into {count} microbatches")
        return self.solve(self.cut(self.traced, self.positions, count), method, fewer=fewer)

    def _on_views_of(self, plan: PlanData) -> Method:
        """The method on a plan's own view, and on the one that is cheapest where memory does not matter."""
        if not isinstance(self.method, Auto) or len(self.meshes) == 1:
            return self.method
        free = {view.shape: cost for view in plan.considered for cost in _free_costs(view)}
        own = [plan.mesh.sizes, min(free, key=free.__getitem__, default=plan.mesh.sizes)]
        return replace(self.method, mesh_shapes=list(dict.fromkeys(own)))

    def _is_held(self, plan: PlanData) -> bool:
        """Whether a plan is slower for want of memory, so that one with more microbatches may be quicker."""
        if computes_all_the_time(plan) or _computes_longer(plan, 2 * plan.microbatches):
            return False
        free = [cost for view in plan.considered for cost in _free_costs(view)]
        limit = plan.memory.limit_bytes
        tight = limit is not None and plan.memory.peak_bytes > _TIGHT * limit
        return tight and bool(free) and plan.cost.total > _BINDS * min(free)

    def _after_misfit(self, error: DoesNotFit, count: int, counts: Sequence[int]) -> int:
        """The number of microbatches to try where nothing fitted; 0 for none."""
        if error.microbatches is None:
            return 0
        wanted, needed = error.microbatches
        return _following(counts, max(wanted, count + 1)) if needed <= _NEAR * error.limit_bytes else 0

    def _uncut(self, reason: CannotCut) -> DoesNotFit:
        """The error of a step that does not fit whole, and cannot be cut."""
        try:
            self.solve(self.traced, self.method)
        except DoesNotFit as error:
            message = f"{error} Its batch cannot be cut into microbatches, which could change its numbers: {reason}."
            return DoesNotFit(message, needed_bytes=error.needed_bytes, limit_bytes=error.limit_bytes)
        raise AssertionError("a step fits that was found not to fit")


def _free_costs(view: Considered) -> list[float]:
    """What choices on a view cost that were made without a limit on memory."""
    rounds = [each for each in view.rounds if not each.num_held and each.progress]
    return [cost for each in rounds if (cost := each.progress[-1].cost) is not None]


def divisors(size: int) -> list[int]:
    """The numbers that divide a size, in order; 1 for none."""
    return [n for n in range(1, size + 1) if size % n == 0] or [1]


def computes_all_the_time(plan: PlanData) -> bool:
    """Whether devices hardly ever wait, and compute nothing that another computes: no split of the step is quicker."""
    return plan.cost.waiting <= NEARLY * plan.step_s and repeats_nothing(plan)


def _computes_longer(plan: PlanData, count: int) -> bool:
    """Whether in so many microbatches devices would compute as long as the step is, though nothing made them wait."""
    cluster = plan.mesh.cluster
    return cluster is not None and LeastStep.of(plan, cluster).in_microbatches(count) >= (1 - NEARLY) * plan.step_s


def repeats_nothing(plan: PlanData) -> bool:
    """Whether nearly all FLOPs of products are split over all devices."""
    loads = [op.load for op in plan.ops if op.load is not None]
    done = sum(load.flops * load.trips * plan.mesh.num_devices for load in loads)
    needed = sum(load.flops * load.trips * (load.num_parts or plan.mesh.num_devices) for load in loads)
    return done <= (1 + NEARLY) * needed


def _following(counts: Sequence[int], least: int) -> int:
    """The first number of microbatches that is no smaller; 0 where there is none."""
    return next((count for count in counts if count >= least), 0)


def _said(error: DoesNotFit, count: int) -> DoesNotFit:
    """An error that says with how many microbatches nothing fitted."""
    if count == 1:
        return error
    return DoesNotFit(
        f"with {count} microbatches {error}", needed_bytes=error.needed_bytes, limit_bytes=error.limit_bytes
    )
