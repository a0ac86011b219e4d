"""Finds the best choice over several mesh views under the memory limit, solving no more than the answer needs.

Memory is held lazily: a problem starts without limits, and the moments at which its answer would not fit are added
until it does. Views are first solved without memory, which bounds what they can reach; then, best bound first, with
memory, and a view whose bound is no better than the best plan so far is left.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DoesNotFit, ShardingError
from meshwright.hardware import Mesh
from meshwright.planner.formulate import Formulation
from meshwright.planner.plan import Considered
from meshwright.planner.readback import Readback
from meshwright.solver import ChoiceProblem, Solution, price, solve
from meshwright.solver.bounds import lower_bound
from meshwright.solver.solution import Status
from meshwright.units import format_bytes

# Problems under a tight memory limit may take long to close the last percent, far below what the costs themselves
# are worth. What is neither proven optimal nor as close to its bound as an allowance asks when its seconds
# are over (a slow machine, kernels that had to be compiled first) is given the next. Answers on the way to one that
# fits need not be that close.
_ALLOWANCES = ((1.0, 1e-2), (3.0, 2e-2), (20.0, 5e-2), (20.0, 5e-2))
_ON_THE_WAY = 1e-2  # the gap at which they stop,
_FAR_OFF = 10.0  # and how many times as far they may be when their seconds are over
_LONG = 20.0  # from this allowance on, problems without a limit need not be proven either
_MAX_ROUNDS = 24
_BOUND_SWEEPS = 40
_DEAR = 100.0  # how much dearer than the step itself its memory is made, to find the least that would do
_DEAR_ROUNDS = 4


@dataclass
class View:
    """One mesh view on the way to its best choice.

    Attributes:
        formulation: Its problem.
        limit: Bytes allowed on each device; None for no limit.
        floor: No choice on this view costs less.
        free_cost: Cost of the best choice if memory were no matter.
        times: Moments at which memory is held, with bytes kept free there for resharded copies.
        solution: The latest solution; its choice may not fit yet.
        peak_bytes: What that choice needs.
        seconds: Time spent.
    """

    formulation: Formulation
    limit: float | None
    floor: float = 0.0
    free_cost: float = 0.0
    times: dict[int, float] = field(default_factory=dict)
    solution: Solution | None = None
    peak_bytes: int = 0
    seconds: float = 0.0

    @property
    def fits(self) -> bool:
        return self.solution is not None and (self.limit is None or self.peak_bytes <= self.limit)

    @property
    def cost(self) -> float:
        assert self.solution is not None
        return float(self.solution.cost)

    def step(self, gap: float = 0.0) -> bool:
        """Solves once, up to a gap, and notes where memory is short; False where nothing can fit."""
        started = time.perf_counter()
        problem = self.formulation.problem(self.times, self.limit if self.times else None)
        solution = _solve(problem, gap, self.solution.choice if self.fits and self.solution else None)
        if solution.choice is not None:
            self.solution = solution
            self._hold_memory(solution.choice)
        self.seconds += time.perf_counter() - started
        self._least = solution.least_limit
        return solution.choice is not None

    @property
    def least_bytes(self) -> float:
        """After `step` failed: a bound on the memory that would do."""
        return float(self._least or self.limit or 0.0)

    def squeeze(self) -> bool:
        """Takes the plan that holds memory dearest, if that fits: what was kept free for copies may be too much."""
        choice, self.peak_bytes = _least_memory(self.formulation)
        found = price(self.formulation.problem({}, None), choice)
        self.solution = Solution(Status.FEASIBLE, choice, found.cost, self.floor, self.peak_bytes)
        return self.fits

    def bound(self, target: float) -> float:
        """A lower bound with memory held at the moments known so far."""
        problem = self.formulation.problem(self.times, self.limit if self.times else None)
        return max(self.floor, lower_bound(problem, iterations=_BOUND_SWEEPS, target=target))

    def _hold_memory(self, choice: NDArray[np.int64]) -> None:
        copies = Readback(self.formulation, choice).copies()
        profile = self.formulation.memory.profile(choice, copies)
        self.peak_bytes = profile.peak_bytes
        if self.fits or self.limit is None:
            return
        before = dict(self.times)
        for moment in _peaks(profile.bytes_at, self.limit):
            reserve = sum(size for start, stop, size in copies if start <= moment < stop)
            self.times[moment] = max(self.times.get(moment, 0.0), reserve)
        if self.times == before:  # every held moment fits as modelled, yet the peak does not: keep more free there
            self.times[profile.peak_at] += self.peak_bytes - self.limit


@dataclass(frozen=True)
class Misfit:
    """A view on which nothing fits, and a bound on what would."""

    mesh: Mesh
    limit: float
    least_bytes: float
    formulate: Callable[[], Formulation]


def search(
    meshes: Sequence[Mesh],
    formulate: Callable[[Mesh], Formulation],
    limit_of: Callable[[Mesh], float | None],
    floor_bytes: Callable[[Mesh], float],
    say: Callable[[str], None],
) -> tuple[View, list[Considered]]:
    """The best view with its best choice that fits, and a word on every view.

    Args:
        meshes: The views to try.
        formulate: Makes the problem of one view.
        limit_of: Bytes allowed on each device of a view.
        floor_bytes: Bytes that no choice on a view can go below, known without its problem.
        say: Told what is being done.

    Raises:
        DoesNotFit: Nothing fits on any view.
        ShardingError: What was laid down is not possible on any view.
    """
    remarks: dict[tuple[int, ...], Considered] = {}
    misfits: list[Misfit] = []
    refused: list[ShardingError] = []
    views: list[View] = []

    def misses(mesh: Mesh, limit: float | None, least: float, make: Callable[[], Formulation]) -> bool:
        if limit is None or least <= limit:
            return False
        misfits.append(Misfit(mesh, limit, least, make))
        remarks[mesh.sizes] = Considered(mesh.sizes, None, int(least), "does not fit")
        return True

    for mesh in meshes:
        say(f"pricing mesh {_name(mesh)}")
        limit = limit_of(mesh)
        if misses(mesh, limit, floor_bytes(mesh), partial(formulate, mesh)):
            continue
        started = time.perf_counter()
        try:
            view = View(formulate(mesh), limit)
        except ShardingError as error:
            refused.append(error)
            remarks[mesh.sizes] = Considered(mesh.sizes, None, None, str(error))
            continue
        least = view.formulation.memory.least().peak_bytes if limit is not None else 0.0
        if misses(mesh, limit, least, lambda view=view: view.formulation):  # type: ignore[misc]
            continue
        if not view.step():
            message = f"what the method lays down cannot be done on mesh {mesh.shape}; choose another method or mesh"
            refused.append(ShardingError(message))
            remarks[mesh.sizes] = Considered(mesh.sizes, None, None, message)
            continue
        view.floor = view.free_cost = view.cost
        view.seconds = time.perf_counter() - started
        views.append(view)
    best = _best(views, remarks, misfits, say)
    if best is None:
        if not misfits:
            raise refused[0]
        raise _does_not_fit(misfits)
    return best, [remarks[mesh.sizes] for mesh in meshes]


def _best(
    views: list[View], remarks: dict[tuple[int, ...], Considered], misfits: list[Misfit], say: Callable
) -> View | None:
    best: View | None = None
    for view in sorted(views, key=lambda v: (not v.fits, v.floor)):
        mesh = view.formulation.mesh
        if best is not None and not _can_beat(view, best):
            remarks[mesh.sizes] = Considered(mesh.sizes, view.floor, None, "at least this much: left")
            continue
        say(f"solving on mesh {_name(mesh)}")
        if not fit(view):
            misfits.append(Misfit(mesh, view.limit or 0.0, view.least_bytes, lambda view=view: view.formulation))  # type: ignore[misc]
            remarks[mesh.sizes] = Considered(mesh.sizes, None, int(view.least_bytes), "does not fit")
            continue
        remarks[mesh.sizes] = Considered(mesh.sizes, view.cost, view.peak_bytes, "")
        if best is None or view.cost < best.cost * (1 - 1e-9):
            best = view
    return best


def _can_beat(view: View, best: View) -> bool:
    goal = best.cost * (1 - 1e-9)
    if view.fits or view.floor >= goal:
        return view.floor < goal
    view.floor = view.bound(best.cost)
    return view.floor < goal


def fit(view: View) -> bool:
    """Solves a view until its choice fits; False where nothing can."""
    for _ in range(_MAX_ROUNDS):
        if view.fits:
            return True
        if not view.step(_ON_THE_WAY):
            return view.squeeze()
        if view.fits:  # now as well as can be; that may not fit again
            view.step()
    return view.fits or view.squeeze()


def _does_not_fit(misfits: list[Misfit]) -> DoesNotFit:
    """The error for the view that needs least, with the memory that a plan was found for."""
    closest = min(misfits, key=lambda m: m.least_bytes)
    limit, mesh = closest.limit, closest.mesh
    _, needed = _least_memory(closest.formulate())
    return DoesNotFit(
        f"no plan fits {format_bytes(limit)} per device; the least that would do is {format_bytes(needed)}, on mesh "
        f"{mesh.shape}. Use more devices, a smaller batch, jax.checkpoint around the layers, or devices with more "
        "memory.",
        needed_bytes=needed,
        limit_bytes=int(limit),
    )


def _least_memory(formulation: Formulation) -> tuple[NDArray[np.int64], int]:
    """A choice that holds memory dearer than time, at every moment at which such a choice peaks; and its peak."""
    least = formulation.memory.least()
    # The dearest strategies, since on an abstract mesh the cheapest are free.
    rate = _DEAR * sum(n * cost.max() for n, cost in zip(formulation.copies, formulation.costs, strict=True))
    dear = {least.peak_at: (rate + 1e-12) / max(least.peak_bytes, 1)}
    found: list[tuple[NDArray[np.int64], int]] = []
    for _ in range(_DEAR_ROUNDS):
        choice = _solve(formulation.problem({}, None, dear)).choice
        assert choice is not None
        profile = Readback(formulation, choice).profile()
        found.append((choice, profile.peak_bytes))
        if profile.peak_at in dear:
            break
        dear[profile.peak_at] = next(iter(dear.values()))
    return min(found, key=lambda it: it[1])


def _solve(problem: ChoiceProblem, gap: float = 0.0, choice: NDArray[np.int64] | None = None) -> Solution:
    held = len(problem.row_node) > 0
    for seconds, close in _ALLOWANCES:
        solution = solve(problem, seconds=seconds, workers=1, initial=choice, keep_interrupted=False, gap=gap)
        proven = solution.status in (Status.OPTIMAL, Status.INFEASIBLE)
        if proven or (solution.gap <= max(close, _FAR_OFF * gap) and (held or seconds >= _LONG)):
            break
        choice = solution.choice
    return solution


def _peaks(bytes_at: NDArray[np.float64], limit: float) -> list[int]:
    """The highest moment of each stretch that is over the limit, the worst four."""
    over = np.flatnonzero(bytes_at > limit)
    stretches = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    tops = sorted((int(s[np.argmax(bytes_at[s])]) for s in stretches if len(s)), key=lambda t: -bytes_at[t])
    return tops[:4]


def _name(mesh: Mesh) -> str:
    return "×".join(map(str, mesh.sizes))
