"""Finds the best choice over several mesh views under the memory limit, solving no more than the answer needs.

Memory is held lazily: a problem starts without limits, and the moments at which its answer would not fit are added
until it does. Views are first solved without memory, which bounds what they can reach; then, best bound first, with
memory, and a view whose bound is no better than the best plan so far is left.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DoesNotFit, ShardingError
from meshwright.hardware import Mesh
from meshwright.planner.formulate import Formulation
from meshwright.planner.plan import Considered
from meshwright.planner.readback import Readback
from meshwright.solver import Solution, solve
from meshwright.solver.bounds import lower_bound
from meshwright.units import format_bytes

_SOLVE_SECONDS = 600.0  # a plan must not depend on the clock: small problems end long before
_MAX_ROUNDS = 24
_BOUND_SWEEPS = 40


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

    def step(self) -> bool:
        """Solves once and notes where memory is short; False where nothing can fit."""
        started = time.perf_counter()
        problem = self.formulation.problem(self.times, self.limit if self.times else None)
        solution = solve(problem, seconds=_SOLVE_SECONDS, workers=1)
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
    misfits: list[tuple[float, Mesh]] = []
    refused: list[ShardingError] = []
    views: list[View] = []
    for mesh in meshes:
        say(f"pricing mesh {_name(mesh)}")
        limit, floor = limit_of(mesh), floor_bytes(mesh)
        if limit is not None and floor > limit:
            misfits.append((floor, mesh))
            remarks[mesh.sizes] = Considered(mesh.sizes, None, int(floor), "does not fit")
            continue
        started = time.perf_counter()
        try:
            view = View(formulate(mesh), limit)
        except ShardingError as error:
            refused.append(error)
            remarks[mesh.sizes] = Considered(mesh.sizes, None, None, str(error))
            continue
        view.step()
        view.floor = view.free_cost = view.cost
        view.seconds = time.perf_counter() - started
        views.append(view)
    best = _best(views, remarks, misfits, say)
    if best is None:
        if not misfits:
            raise refused[0]
        raise _does_not_fit(min(misfits, key=lambda m: m[0])[1], formulate, limit_of, min(m[0] for m in misfits))
    return best, [remarks[mesh.sizes] for mesh in meshes]


def _best(
    views: list[View], remarks: dict[tuple[int, ...], Considered], misfits: list[tuple[float, Mesh]], say: Callable
) -> View | None:
    best: View | None = None
    for view in sorted(views, key=lambda v: (not v.fits, v.floor)):
        mesh = view.formulation.mesh
        if best is not None and not _can_beat(view, best):
            remarks[mesh.sizes] = Considered(mesh.sizes, view.floor, None, "at least this much: left")
            continue
        say(f"solving on mesh {_name(mesh)}")
        if not fit(view):
            misfits.append((view.least_bytes, mesh))
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
        if not view.step():
            return False
    return view.fits


def _does_not_fit(
    mesh: Mesh, formulate: Callable[[Mesh], Formulation], limit_of: Callable[[Mesh], float | None], least: float
) -> DoesNotFit:
    limit = limit_of(mesh) or 0.0
    needed = _least_memory(formulate(mesh), max(least, limit))
    return DoesNotFit(
        f"no plan fits {format_bytes(limit)} per device; the least that would do is {format_bytes(needed)}, on mesh "
        f"{mesh.shape}. Use more devices, a smaller batch, jax.checkpoint around the layers, or devices with more "
        "memory.",
        needed_bytes=needed,
        limit_bytes=int(limit),
    )


def _least_memory(formulation: Formulation, least: float) -> int:
    """The least memory with which a plan is found: the bound is raised until one fits."""
    for _ in range(8):
        view = View(formulation, least)
        view.step()
        if fit(view):
            return view.peak_bytes
        least = max(view.least_bytes, least * 1.02)
    return int(least)


def _peaks(bytes_at: NDArray[np.float64], limit: float) -> list[int]:
    """The highest moment of each stretch that is over the limit, the worst four."""
    over = np.flatnonzero(bytes_at > limit)
    stretches = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    tops = sorted((int(s[np.argmax(bytes_at[s])]) for s in stretches if len(s)), key=lambda t: -bytes_at[t])
    return tops[:4]


def _name(mesh: Mesh) -> str:
    return "×".join(map(str, mesh.sizes))
