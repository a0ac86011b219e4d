"""Finds the best choice over several mesh views under the memory limit, solving no more than the answer needs.

Views are first solved without memory, which bounds what they can reach; then with memory, a step at a time, always the
one that promises most: at first no further than until another promises more. When all that may be better than the best
plan so far are nearly solved, the most promising are solved to the end if their gaps are still wide: most of the time
goes to the last few thousandths, which hardly change a choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DoesNotFit, ShardingError
from meshwright.hardware import Mesh
from meshwright.planner.budget import Budget
from meshwright.planner.reading.readback import MeshProblem
from meshwright.planner.remedies import remedies
from meshwright.planner.solving.carry_over import translated
from meshwright.planner.solving.fit_memory import View, least_memory
from meshwright.plans.plan import Considered
from meshwright.solver.problem.solution import Status
from meshwright.units import format_bytes

_LESS = 1 - 1e-9  # of a cost: less is equal, by the tolerance of a solve


@dataclass(frozen=True)
class Misfit:
    """A view on which nothing fits, or was found to; and a bound on what would."""

    mesh: Mesh
    limit: float
    least_bytes: float
    formulate: Callable[[], MeshProblem]
    is_proven: bool = True


def search(
    meshes: Sequence[Mesh],
    formulate: Callable[[Mesh], MeshProblem],
    limit_of: Callable[[Mesh], float | None],
    floor_bytes: Callable[[Mesh], float],
    say: Callable[[str], None],
    budget: Budget,
) -> tuple[View, list[Considered]]:
    """The best view with its best choice that fits, and a word on every view.

    Args:
        meshes: The views to try.
        formulate: Makes the problem of one view.
        limit_of: Bytes allowed on each device of a view.
        floor_bytes: Bytes that no choice on a view can go below, known without its problem.
        say: Called with each stage.
        budget: The time for it; the first view that can be solved is solved whatever it takes.

    Raises:
        DoesNotFit: Nothing fits on any view.
        ShardingError: The fixed shardings are impossible on every view.
    """
    remarks: dict[tuple[int, ...], Considered] = {}
    misfits: list[Misfit] = []
    refused: list[ShardingError] = []
    views: list[View] = []
    begun = budget.now

    def refuse(mesh: Mesh, error: ShardingError) -> None:
        refused.append(error)
        remarks[mesh.sizes] = Considered(mesh.sizes, None, None, str(error))

    def misses(mesh: Mesh, limit: float | None, least: float, make: Callable[[], MeshProblem]) -> bool:
        if limit is None or least <= limit:
            return False
        misfits.append(Misfit(mesh, limit, least, make))
        remarks[mesh.sizes] = Considered(mesh.sizes, None, int(least), "does not fit")
        return True

    for mesh in meshes:
        if views and budget.is_for_solving:
            remarks[mesh.sizes] = Considered(mesh.sizes, None, None, f"not tried in {budget.seconds:g} s")
            continue
        say(f"pricing mesh {_name(mesh)}")
        limit = limit_of(mesh)
        if misses(mesh, limit, floor_bytes(mesh), partial(formulate, mesh)):
            continue
        started = budget.now
        try:
            view = View(formulate(mesh), limit, budget=budget)
        except ShardingError as error:
            refuse(mesh, error)
            continue
        least = view.formulation.memory.least().peak_bytes if limit is not None else 0.0
        if misses(mesh, limit, least, lambda view=view: view.formulation):  # type: ignore[misc]
            continue
        if not view.step():
            refuse(mesh, ShardingError(_refusal(view, budget)))
            continue
        view.floor, view.free = view.cost, view.solution
        view.seconds = budget.now - started
        views.append(view)
    budget.hold_memory(budget.now - begun)
    if all(view.is_small for view in views) and any(max(view.formulation.copies) > 1 for view in views):
        budget = budget.part(budget.tuning.tied_share)
        for view in views:
            view.budget = budget
    best = _best(views, remarks, misfits, say, budget)
    if best is None:
        if not misfits:
            raise refused[0]
        raise _does_not_fit(misfits)
    rounds = {view.formulation.mesh.sizes: tuple(view.rounds) for view in views}
    return best, [replace(remarks[mesh.sizes], rounds=rounds.get(mesh.sizes, ())) for mesh in meshes]


def _best(
    views: list[View], remarks: dict[tuple[int, ...], Considered], misfits: list[Misfit], say: Callable, budget: Budget
) -> View | None:
    best: View | None = None
    said = ""
    waiting = [(view.is_near, view.promise, number) for number, view in enumerate(views)]
    heapify(waiting)
    while waiting:
        *_, number = heappop(waiting)
        view = views[number]
        mesh = view.formulation.mesh
        goal = (
            np.inf if best is None or best is view else best.cost * (view.tuning.much_less if view.is_near else _LESS)
        )
        if best is not None and budget.is_over:
            goal = -np.inf
        if view.promise < goal and not view.done:
            if _name(mesh) != said:
                said = _name(mesh)
                say(f"solving on mesh {said}")
            if not view.is_taken_up:
                view.initial = _start(view, views)
            ahead = waiting[0][1] if waiting and not view.is_taken_up else np.inf
            if not view.advance(min(goal, ahead)):
                misfits.append(_misfit(view))
                remarks[mesh.sizes] = Considered(mesh.sizes, None, int(view.least_bytes), "does not fit")
                continue
        remarks[mesh.sizes] = _remark(view)
        if view.fitted is not None and (best is None or view.cost < best.cost * _LESS):
            best = view
        if view.promise < goal and not view.done:
            heappush(waiting, (view.is_near, view.promise, number))
    if best is not None:
        best.settle()  # time may have been over before it was done
    return best


def _misfit(view: View) -> Misfit:
    limit, is_proven = view.limit or 0.0, view.proven == np.inf
    return Misfit(view.formulation.mesh, limit, view.least_bytes, lambda: view.formulation, is_proven)


def _refusal(view: View, budget: Budget) -> str:
    """Why a view has no choice at all, whatever the memory."""
    mesh = view.formulation.mesh
    if view.rounds[-1].status != Status.INFEASIBLE:
        return f"no choice was found on mesh {mesh.shape} in the time given; give more than {budget.seconds} seconds"
    return f"the method asks for shardings that are impossible on mesh {mesh.shape}; choose another method or mesh"


def _start(view: View, views: list[View]) -> NDArray[np.int64] | None:
    """A choice for a view by what is known of others, the best first."""
    known = [(other.cost, number, other.fitted) for number, other in enumerate(views) if other.fitted is not None]
    for _, number, fitted in sorted(known, key=lambda it: it[:2]):
        start = translated(fitted.choice, views[number].formulation, view.formulation)
        if start is not None:
            return start
    return None


def _remark(view: View) -> Considered:
    sizes, fitted = view.formulation.mesh.sizes, view.fitted
    if fitted is None:
        return Considered(sizes, view.floor, None, "lower bound; not solved further")
    return Considered(sizes, view.cost, int(fitted.peak_usage), "")


def _does_not_fit(misfits: list[Misfit]) -> DoesNotFit:
    """The error for the view that needs least, with the memory that a plan was found for."""
    closest = min(misfits, key=lambda m: m.least_bytes)
    limit, mesh = closest.limit, closest.mesh
    formulation = closest.formulate()
    choice, needed = least_memory(formulation)
    found = "no plan fits" if all(m.is_proven for m in misfits) else "no plan was found that fits"
    return DoesNotFit(
        f"{found} {format_bytes(limit)} per device; the least for which a plan was found is "
        f"{format_bytes(needed)}, on mesh {mesh.shape}. {remedies(formulation, choice, needed, limit)}",
        needed_bytes=needed,
        limit_bytes=int(limit),
    )


def _name(mesh: Mesh) -> str:
    return "×".join(map(str, mesh.sizes))
