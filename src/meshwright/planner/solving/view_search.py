"""Finds the best choice over several mesh views under the memory limit, solving no more than the answer needs.

Views are first solved without memory, which bounds what they can reach; then with memory, a step at a time, always the
one that promises most: at first no further than until another promises more. In the second half of the time a view is
not left before a choice fits, since bounds of many views are no plan. When all that may be better than the best plan so
far are nearly solved, the most promising are solved to the end if their gaps are still wide: most of the time
goes to the last few thousandths, which hardly change a choice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from meshwright.planner.solving.fit_memory import LESS, Stage, View, ViewState, solve_free
from meshwright.planner.solving.named_starts import Restricted, with_starts
from meshwright.planner.solving.solves import least_memory
from meshwright.plans.plan import PROVEN_GAP, Considered
from meshwright.solver.problem.solution import Status
from meshwright.units import format_bytes

_FINE = 3  # axes of the views that refine others


@dataclass(frozen=True)
class Misfit:
    """A view on which nothing fits, or was found to; and a bound on what would."""

    mesh: Mesh
    limit: float
    least_bytes: float
    formulate: Callable[[], MeshProblem]
    is_proven: bool = True


@dataclass(frozen=True)
class ViewSearch:
    """The views to solve and how.

    Attributes:
        formulate: Makes the problem of one view.
        limit_of: Bytes allowed on each device of a view.
        floor_bytes: Bytes that no choice on a view can go below, known without its problem.
        named: A view's problem as a named method restricts it.
        refined: Of views of three axes those to try, given the floors of those of fewer.
        say: Called with each stage.
    """

    formulate: Callable[[Mesh], MeshProblem]
    limit_of: Callable[[Mesh], float | None]
    floor_bytes: Callable[[Mesh], float]
    named: Restricted
    refined: Callable[[Sequence[Mesh], Mapping[tuple[int, ...], float]], Sequence[Mesh]]
    say: Callable[[str], None]


@dataclass(frozen=True)
class Findings:
    """What a search found out about views other than their choices: a word on each, and why some cannot be taken."""

    remarks: dict[tuple[int, ...], Considered] = field(default_factory=dict)
    misfits: list[Misfit] = field(default_factory=list)
    refused: list[ShardingError] = field(default_factory=list)

    def refuse(self, mesh: Mesh, error: ShardingError) -> None:
        """Notes that a view has no choice, whatever the memory."""
        self.refused.append(error)
        self.remarks[mesh.sizes] = Considered(mesh.sizes, None, None, str(error))

    def miss(self, misfit: Misfit) -> None:
        """Notes that nothing fits on a view."""
        self.misfits.append(misfit)
        sizes = misfit.mesh.sizes
        self.remarks[sizes] = Considered(sizes, None, int(misfit.least_bytes), "does not fit")

    def error(self, scale: float) -> Exception:
        """Why there is no plan: a `DoesNotFit`, for which the least memory is sought, or a `ShardingError`.

        Args:
            scale: How many bytes are needed for each that is modelled, in which limits are.
        """
        return _does_not_fit(self.misfits, scale) if self.misfits else self.refused[0]


def search(
    meshes: Sequence[Mesh], how: ViewSearch, budget: Budget, findings: Findings
) -> tuple[ViewState, list[Considered]] | None:
    """The best view with its best choice that fits, and a word on every view; None where there is none on any.

    Args:
        meshes: The views to try.
        how: Their problems and limits.
        budget: The time for it; the first view that can be solved is solved whatever it takes.
        findings: Takes what is found of views, among it why there is no plan.
    """
    begun = budget.now
    states = _solve_free(meshes, how, findings, budget)
    budget.hold_memory(budget.now - begun)
    if all(state.view.is_small for state in states) and any(max(state.formulation.copies) > 1 for state in states):
        budget = budget.part(budget.tuning.phase_share)
    states = with_starts(states, how.named, budget.part(budget.tuning.phase_share))
    best = solve_best(states, findings, how.say, budget)
    if best is None:
        return None
    rounds = {state.formulation.mesh.sizes: state.rounds for state in states}
    return best, [replace(findings.remarks[mesh.sizes], rounds=rounds.get(mesh.sizes, ())) for mesh in meshes]


def _solve_free(meshes: Sequence[Mesh], how: ViewSearch, findings: Findings, budget: Budget) -> list[ViewState]:
    """The views on which some choice is possible, solved without memory: of those of three axes, the promising."""
    coarse = [mesh for mesh in meshes if len(mesh.sizes) != _FINE]
    states = _each_free(coarse, how, findings, budget)
    fine = [mesh for mesh in meshes if len(mesh.sizes) == _FINE]
    tried = how.refined(fine, {state.formulation.mesh.sizes: state.floor for state in states})
    for mesh in fine:
        if mesh not in tried:
            findings.remarks[mesh.sizes] = Considered(mesh.sizes, None, None, "not tried: others promise more")
    return states + _each_free(tried, how, findings, budget, bool(states))


def _each_free(
    meshes: Sequence[Mesh], how: ViewSearch, findings: Findings, budget: Budget, is_any: bool = False
) -> list[ViewState]:
    """Views solved without memory; where there is any before them, only as long as there is time."""
    states: list[ViewState] = []
    for mesh in meshes:
        if (states or is_any) and budget.is_for_solving:
            findings.remarks[mesh.sizes] = Considered(mesh.sizes, None, None, f"not tried in {budget.seconds:g} s")
            continue
        how.say(f"pricing mesh {_name(mesh)}")
        try:
            state = _solved_free(mesh, how, budget)
        except ShardingError as error:
            findings.refuse(mesh, error)
            continue
        if isinstance(state, Misfit):
            findings.miss(state)
        else:
            states.append(state)
    return states


def _solved_free(mesh: Mesh, how: ViewSearch, budget: Budget) -> ViewState | Misfit:
    """One view solved without memory, or a bound on what it needs where that is too much."""
    limit, started = how.limit_of(mesh), budget.now
    if limit is not None and (least := how.floor_bytes(mesh)) > limit:
        return Misfit(mesh, limit, least, partial(how.formulate, mesh))
    formulation = how.formulate(mesh)
    if limit is not None and (least := formulation.memory.least().peak_bytes) > limit:
        return Misfit(mesh, limit, least, lambda: formulation)
    state = solve_free(ViewState(View(formulation, limit)), budget)
    if state.has_failed:
        raise ShardingError(_refusal(state, budget))
    return replace(state, seconds=budget.now - started)


def solve_best(
    states: list[ViewState], findings: Findings, say: Callable[[str], None], budget: Budget
) -> ViewState | None:
    """The best view with its best choice that fits, or None; the list is left with the latest states."""
    started = [number for number, state in enumerate(states) if state.fitted is not None]
    best = min(started, key=lambda number: states[number].cost, default=None)
    said = ""
    waiting = [_urgency(state, number) for number, state in enumerate(states)]
    heapify(waiting)
    half, is_checked = budget.part(budget.tuning.phase_share), False
    while waiting:
        *_, number = heappop(waiting)
        state = states[number]
        mesh = state.formulation.mesh
        if best is None and waiting and budget.is_over and not is_checked:
            is_checked = True
            if misfits := _all_misfits([state, *(states[other] for *_, other in waiting)]):
                for misfit in misfits:
                    findings.miss(misfit)
                return None
        goal = _goal(state, None if best in (None, number) else states[best].cost)
        if best is not None and budget.is_over:
            goal = -np.inf
        if state.promise < goal and not state.is_done:
            if _name(mesh) != said:
                said = _name(mesh)
                say(f"solving on mesh {said}")
            ahead = np.inf
            if not state.num_advances:
                state = replace(state, initial=_start(state, states))
                ahead = waiting[0][1] if waiting else np.inf
            states[number] = state = state.advance(min(goal, ahead), budget)
            if state.has_failed:
                findings.miss(_misfit(state))
                continue
        findings.remarks[mesh.sizes] = _remark(state)
        if state.fitted is not None and (best is None or state.cost < states[best].cost * LESS):
            best = number
        if state.promise < goal and not state.is_done:
            stays = state.stage is Stage.OPEN and half.is_over
            heappush(waiting, (False, -np.inf, number) if stays else _urgency(state, number))
    return None if best is None else states[best].settled()  # time may have been over before it was done


def _urgency(state: ViewState, number: int) -> tuple[bool, float, int]:
    """The order in which views are advanced: those that are not nearly solved first, the most promising first."""
    return state.stage is Stage.NEAR, state.promise, number


def _goal(state: ViewState, best: float | None) -> float:
    """What a view must promise to be better than the best cost of others."""
    if best is None:
        return np.inf
    return best * (1.0 - PROVEN_GAP if state.stage is Stage.NEAR else LESS)


def _all_misfits(states: Sequence[ViewState]) -> list[Misfit]:
    """Views on which no choice was found, where that of the least memory does not fit; none where it does.

    It takes longer to look for than to solve a view, so it is looked for on the view alone whose bound is the least.
    """
    leanest = min(states, key=lambda state: state.formulation.memory.least().peak_bytes)
    if leanest.view.limit is None:
        return []
    _, needed = least_memory(leanest.formulation)
    return [_misfit(state) for state in states] if needed > leanest.view.limit else []


def _misfit(state: ViewState) -> Misfit:
    limit, is_proven = state.view.limit or 0.0, state.proven == np.inf
    return Misfit(state.formulation.mesh, limit, state.least_bytes, lambda: state.formulation, is_proven)


def _refusal(state: ViewState, budget: Budget) -> str:
    """Why a view has no choice at all, whatever the memory."""
    mesh = state.formulation.mesh
    if state.rounds[-1].status != Status.INFEASIBLE:
        return f"no choice was found on mesh {mesh.shape} in the time given; give more than {budget.seconds} seconds"
    return f"the method asks for shardings that are impossible on mesh {mesh.shape}; choose another method or mesh"


def _start(state: ViewState, states: list[ViewState]) -> NDArray[np.int64] | None:
    """A choice for a view by what is known of others, the best first."""
    known = [(other.cost, number, other.fitted) for number, other in enumerate(states) if other.fitted is not None]
    for _, number, fitted in sorted(known, key=lambda it: it[:2]):
        start = translated(fitted.choice, states[number].formulation, state.formulation)
        if start is not None:
            return start
    return None


def _remark(state: ViewState) -> Considered:
    sizes, fitted = state.formulation.mesh.sizes, state.fitted
    if fitted is None:
        return Considered(sizes, state.floor, None, "lower bound; not solved further")
    return Considered(sizes, state.cost, int(fitted.peak_usage), "")


def _does_not_fit(misfits: list[Misfit], scale: float) -> DoesNotFit:
    """The error for the view that needs least, with the memory that a plan was found for."""
    closest = min(misfits, key=lambda m: m.least_bytes)
    limit, mesh = closest.limit, closest.mesh
    formulation = closest.formulate()
    choice, needed = least_memory(formulation)
    found = "no plan fits" if all(m.is_proven for m in misfits) else "no plan was found that fits"
    told, cut = remedies(formulation, choice, needed, limit, scale)
    return DoesNotFit(
        f"{found} {format_bytes(scale * limit)} per device; the least for which a plan was found is "
        f"{format_bytes(scale * needed)}, on mesh {mesh.shape}. {told}",
        needed_bytes=int(scale * needed),
        limit_bytes=int(scale * limit),
        microbatches=cut,
    )


def _name(mesh: Mesh) -> str:
    return "×".join(map(str, mesh.sizes))
