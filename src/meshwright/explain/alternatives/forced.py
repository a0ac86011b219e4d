"""Prices alternatives: forces a sharding, solves the problem again, and itemises the difference."""

import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Ints
from meshwright.parallelism.words import label_words
from meshwright.planner.solving.fit_memory import View, ViewState
from meshwright.planner.solving.held_memory import Moments
from meshwright.planner.solving.tuning import VIEW_TUNING
from meshwright.plans.records.record import Edge, Record
from meshwright.strategy.reshard import SLICE, Resharding

if TYPE_CHECKING:
    from meshwright.hardware import Mesh

_CLOSE = 1e-2  # relative gap at which a re-solve under a memory limit ends, as in planning
_PROVEN = 1e-9  # relative difference between a cost and its bound that is only rounding
# A single allowance: a solve that ran out of time while the solver was loaded would begin again.
_PATIENT = replace(VIEW_TUNING, allowances=VIEW_TUNING.allowances[-1:])
_ROUNDS = 6
_ALWAYS = 8  # shardings that are always priced without memory, however long that takes
_ALWAYS_TIGHTLY = 2  # shardings that are always priced under a limit that the plan itself fills
_FULL = 0.97  # fraction of the limit from which memory counts as full
_LOADING = 1.0  # extra seconds of the first solve, which loads the solver
_FREE = 0.5  # largest fraction of the time spent on solves without memory
_SWEEPS = 40  # sweeps of the dual ascent that bounds all alternatives at once
_INFEASIBLE = 1e4  # price of an infeasible strategy, in times of the plan's cost


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that would cost more or less: compute or a collective, where, and how many seconds in all."""

    what: str
    where: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ForcedPlan:
    """The best plan with a sharding forced.

    Attributes:
        code: The sharding.
        cost: Seconds of one step of the best plan found that fits; inf where none was.
        at_least: A lower bound on plans with this sharding; inf where there is none.
        peak_bytes: Memory on each device of that plan; where none fits, of the fastest that does not, or a bound on it.
        choice: The plan's strategies; None where none was found.
    """

    code: int
    cost: float
    at_least: float
    peak_bytes: int
    choice: Ints | None

    @property
    def is_exact(self) -> bool:
        """Whether the plan found is proved optimal, or no plan exists."""
        return self.at_least == float("inf") or self.cost <= self.at_least * (1 + _PROVEN)


class Pricing:
    """Re-solves the problem of a record.

    Args:
        record: The record.
        floor: A lower bound on the plans that the method allows and that fit; None where it is not known.
    """

    def __init__(self, record: Record, floor: float | None = None):
        self.problem, self.program = record.problem, record.program
        self._given_floor = floor

    @cached_property
    def _floor(self) -> float:
        if self._given_floor is not None and self.problem.limit is None:
            return self._given_floor
        return max(self.free.at_least, self._given_floor or 0.0)

    @cached_property
    def free(self) -> ForcedPlan:
        """The best plan without a memory limit."""
        if len(self.problem.unlimited):
            choice = self.problem.unlimited
            cost = self.problem.cost_of(choice)
            profile = self.problem.memory.profile(choice, self.problem.copies_made(choice))
            return ForcedPlan(-1, cost, cost, profile.peak_bytes, choice)
        state = ViewState(View(self.problem, None, _PATIENT)).step()
        assert state.latest is not None
        return ForcedPlan(-1, state.cost, state.proven, state.peak_bytes, state.latest.choice)

    def forced(self, node: int, codes: list[int], seconds: float) -> tuple[list[ForcedPlan], int]:
        """The best plan for each sharding of a node, cheapest first, and the number left out for lack of time.

        All are first solved without memory, the most promising first, which is quick and bounds them; then shardings
        whose solution does not fit are solved under the limit, each with its share of the remaining seconds. Where the
        plan itself fills the memory, they are solved under the limit at once. The time to load the solver does not
        count.
        """
        if self._tight.reserved:
            return self._forced_tightly(node, codes, seconds)
        plans: list[ForcedPlan] = []
        possible: dict[int, ViewState] = {}
        order, begun = self._promising(node, codes), time.perf_counter()
        for number, code in enumerate(order):
            if number >= _ALWAYS and time.perf_counter() > begun + _FREE * seconds:
                break
            state = self._begin(node, code).step()
            if state.has_failed:
                plans.append(ForcedPlan(code, float("inf"), float("inf"), 0, None))
            else:
                possible[code] = state
            if number == 0:
                begun = time.perf_counter()
        seconds -= time.perf_counter() - begun
        for place, (code, state) in enumerate(sorted(possible.items(), key=lambda item: item[1].cost)):
            floor = self._floor if self._is_allowed(node, code) else 0.0
            started = time.perf_counter()
            plans.append(self._under_limit(code, state, floor, seconds / (len(possible) - place)))
            seconds -= time.perf_counter() - started
        return sorted(plans, key=_cheapest), len(order) - len(plans)

    def bounded(self, node: int, codes: list[int]) -> list[ForcedPlan]:
        """Lower bounds on the plans with each sharding of a node, without solving for any; the least first."""
        of_node, floors = self.problem.nodes[node].codes, self._floors[node]
        plans = []
        for code in codes:
            least = float(floors[of_node == code].min())
            at_least = max(least, self._floor) if self._is_allowed(node, code) else least
            plans.append(ForcedPlan(code, float("inf"), at_least, 0, None))
        return sorted(plans, key=lambda p: (p.at_least, p.code))

    @cached_property
    def _floors(self) -> list[NDArray[np.float64]]:
        """For each strategy of each node, a lower bound on any choice with it: one dual solution gives all of them."""
        from meshwright.solver.bounds.dual import Dual, ascend_prices
        from meshwright.solver.model.model import from_problem

        problem, limited = self.problem, dict.fromkeys(self._tight.reserved, 0.0)  # others may not need its copies
        free = [replace(n, allowed=np.ones(len(n.codes), bool)) for n in problem.nodes]
        model = from_problem(replace(problem, nodes=free).problem(limited, problem.limit if limited else None))
        plan_cost = problem.cost_of(problem.choice)
        # Costs of infeasible strategies must be finite for message passing; at this price they are in no plan.
        dual = Dual(
            model._replace(**{k: np.minimum(getattr(model, k), _INFEASIBLE * plan_cost) for k in ("cost", "mat")})
        )
        dual.converge(_SWEEPS)
        if limited:
            ascend_prices(dual, plan_cost, _SWEEPS)
        floors = np.where(dual.floor < _INFEASIBLE * plan_cost / 2, dual.floor - 1e-12 * plan_cost, np.inf)
        return [floors[a:b] for a, b in pairwise(model.off.tolist())]

    def _forced_tightly(self, node: int, codes: list[int], seconds: float) -> tuple[list[ForcedPlan], int]:
        plans: list[ForcedPlan] = []
        order, begun = self._promising(node, codes), time.perf_counter()
        for number, code in enumerate(order):
            left = seconds - (time.perf_counter() - begun)
            if number >= _ALWAYS_TIGHTLY and left <= 0:
                break
            state = replace(self._begin(node, code), moments=self._tight)
            floor = self._floor if self._is_allowed(node, code) else self._unlimited(node, code)
            share = max(left / max(_ALWAYS_TIGHTLY - number, 1), seconds / _ALWAYS_TIGHTLY)
            plans.append(self._under_limit(code, state, floor, share if number else share + _LOADING))
            if number == 0:
                begun = max(begun, time.perf_counter() - share)
        return sorted(plans, key=_cheapest), len(order) - len(plans)

    def _unlimited(self, node: int, code: int) -> float:
        """A lower bound on the plans with a sharding, without a memory limit."""
        return self._begin(node, code).step().proven

    def _promising(self, node: int, codes: list[int]) -> list[int]:
        """Shardings in the order of the least cost of their node and its edges."""
        least = self.problem.costs[node] * self.problem.copies[node]
        for (source, _, reader, _), (num, matrix) in self.problem.matrices.items():
            if source == node:
                least = least + num * matrix.min(axis=1)
            elif reader == node:
                least = least + num * matrix.min(axis=0)
        of_node = self.problem.nodes[node].codes
        return sorted(codes, key=lambda code: (float(least[of_node == code].min()), code))

    @cached_property
    def _tight(self) -> Moments:
        """The moments at which the plan itself nearly fills the memory, and the copies that it makes there."""
        limit = None if self.problem.limit is None else _FULL * self.problem.limit
        return Moments().tightened(self.problem, self.problem.choice, limit)[0]

    def _is_allowed(self, node: int, code: int) -> bool:
        subject = self.problem.nodes[node]
        return bool(subject.allowed[subject.codes == code].any())

    def _begin(self, node: int, code: int) -> ViewState:
        strategies = self.problem.nodes[node].codes == code
        start = self.problem.choice.copy()
        start[node] = np.flatnonzero(strategies)[0]
        return ViewState(View(self.problem.forced(node, strategies), None, _PATIENT), start)

    def _under_limit(self, code: int, state: ViewState, floor: float, seconds: float) -> ForcedPlan:
        """The best plan with a sharding under the limit, from what is known of it without one."""
        state, peak = state.under(self.problem.limit), state.peak_bytes
        for _ in range(_ROUNDS):
            if state.fits or seconds <= 0:
                break
            started = time.perf_counter()
            tuning = replace(_PATIENT, allowances=((seconds, _CLOSE),))
            state = replace(state, view=replace(state.view, tuning=tuning)).step(_CLOSE)
            seconds -= time.perf_counter() - started
            if state.has_failed:
                reserved = state.moments.reserved
                if state.proven == float("inf") or not any(reserved.values()):
                    break
                state = replace(state, moments=replace(state.moments, reserved=dict.fromkeys(reserved, 0.0)))
        at_least = max(floor, state.proven)
        if not state.fits or state.latest is None:
            needed = ceil(state.least_bytes) if at_least == float("inf") else 0
            return ForcedPlan(code, float("inf"), at_least, max(peak, state.peak_bytes, needed), None)
        return ForcedPlan(code, state.cost, min(at_least, state.cost), state.peak_bytes, state.latest.choice)

    def changes(self, mesh: "Mesh", names: tuple[str, ...], other: Ints) -> list[Change]:
        """The differences in cost between another choice and the plan's, the largest first.

        Args:
            mesh: The problem's mesh.
            names: The names of its axes.
            other: The other choice.
        """
        seconds_of: dict[tuple[str, str], float] = {}

        def add(what: str, where: str, seconds: float) -> None:
            if seconds:
                seconds_of[what, where] = seconds_of.get((what, where), 0.0) + seconds

        mine = self.problem.choice
        for node, a, b in zip(self.problem.nodes, mine, other, strict=True):
            phase = f" ({self.program.phases[node.phase]})" if node.phase >= 0 else ""
            where = label_words(node.label) + phase
            add("compute", where, node.num * float(node.compute[b] - node.compute[a]))
            for kind, axes, seconds in node.sent:
                add(_collective(kind, [names[i] for i in axes]), where, node.num * float(seconds[b] - seconds[a]))
        resharding = Resharding(mesh, self.problem.axes)
        for edge in self.problem.edges:
            if mine[edge.source] == other[edge.source] and mine[edge.reader] == other[edge.reader]:
                continue
            for choice, sign in ((other, 1.0), (mine, -1.0)):
                ends, where = (choice[edge.source], choice[edge.reader]), label_words(edge.value)
                if cost := edge.num * float(edge.resharding[ends]):
                    add(self._hops(resharding, edge, choice, names), where, sign * cost)
                if len(edge.offers):
                    add("reduced together with another sum", where, -sign * edge.num * float(edge.joined[ends]))
        rows = [Change(what, where, seconds) for (what, where), seconds in seconds_of.items() if abs(seconds) > 1e-12]
        return sorted(rows, key=lambda change: -abs(change.seconds))

    def _hops(self, resharding: Resharding, edge: Edge, choice: Ints, names: tuple[str, ...]) -> str:
        shape, _, itemsize = self.program.types[edge.type]
        source_code, needed = int(edge.made[choice[edge.source]]), int(edge.needed[choice[edge.reader]])
        hops = resharding.path(tuple(shape), itemsize, source_code, needed)
        sent = [_collective(hop.kind, [names[a] for a in hop.axes]) for hop in hops if hop.kind != SLICE]
        return ", ".join(dict.fromkeys(sent)) or "resharding"


def _cheapest(priced: ForcedPlan) -> tuple[float, float, int]:
    """Sorts by cost, or by its bound where there is none."""
    is_solved = priced.cost < float("inf")
    return priced.cost if is_solved else priced.at_least, priced.at_least, priced.code


def _collective(kind: str, axes: list[str]) -> str:
    return f"{kind} over {', '.join(axes)}" if axes else "resharding"
