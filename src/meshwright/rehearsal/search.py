"""`mw.Auto(profile=True)`: plans by measurement.

The parts of several plans are measured: of the plan that the model prefers, of plans by other methods, and of plans
with other splits of the blocks of large segments; the cheapest by the model and a few others. Measured ratios correct
the model, the same problem is solved again under the same memory limit, and the parts of the new plan are measured,
until the plan has no part that is worth measuring and was not. Where the devices of the mesh are here, parts run on
them with their collectives, and in the end the plan and the model's own plan run as whole programs: the faster is
returned. Elsewhere one device rehearses the parts and the whole step. The time of the whole step is the plan's price
where it was measured: XLA fuses across parts, so that they take another time in all than each by itself.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from meshwright.blocks.find import blocks_of
from meshwright.errors import DoesNotFit, ShardingError
from meshwright.graph import Traced
from meshwright.hardware import Mesh
from meshwright.planner.budget import Budget
from meshwright.planner.fixed_splits import FixedSplits
from meshwright.planner.methods import NAMED, Auto
from meshwright.planner.planner import plan_program
from meshwright.planner.pricing.corrections import Corrections
from meshwright.plans.plan import Cost, PlanData, SolutionSummary
from meshwright.profiler.measurements import Database, open_database
from meshwright.profiler.measurements.turn import my_turn
from meshwright.progress import Say
from meshwright.rehearsal.combinations import some_combinations
from meshwright.rehearsal.learning.calibration import keep_work
from meshwright.rehearsal.learning.from_parts import Measured, communication_s, compute_s, corrections
from meshwright.rehearsal.measuring import Candidate, Measuring, StepCandidate
from meshwright.rehearsal.memory import keep_memory, modelled_bytes, with_memory
from meshwright.rehearsal.parts import MeasuredPart, parts_of, step_of
from meshwright.rehearsal.whole_steps import Step, compiled_in, step_times
from meshwright.runtime.spmd import device_mesh
from meshwright.units import format_bytes, format_seconds

MOST_CANDIDATES = 12  # of a segment, the cheapest by the model
EXPLORERS = 3  # further candidates of a segment, from its most expensive ones
WORTH = 0.01  # parts below this share of a plan's modelled compute are not measured
LARGE = 0.1  # segments of at least this share are tried with other splits of their blocks
MOST_PLANNED = 2 * MOST_CANDIDATES  # combinations of a segment that are planned and ranked
MOST_ROUNDS = 4  # of planning with corrections


@dataclass
class MeasuredSearch:
    """Planning by measurement.

    Attributes:
        traced, meshes, method, say: As in `plan_program`.
        database: Where measurements are kept; the user's own by default.
        calibrated: Corrections by what is known of the chip, for whatever is not measured.
        remarks: What a reader should know, a sentence each.
    """

    traced: Traced
    meshes: list[Mesh]
    method: Auto
    say: Say
    calibrated: Corrections | None = None
    database: Database = field(default_factory=open_database)
    remarks: list[str] = field(default_factory=list)

    def plan(self) -> PlanData:
        """The best plan by what was measured and, where nothing was, by the model."""
        self.bytes_factor = 1.0 if self.calibrated is None else self.calibrated.memory
        modelled = self._solve(self.method, self.meshes, self.calibrated)
        device = self._device(modelled)
        if device is None:
            self.remarks.append(f"Nothing was measured: no device here is a {_chip(modelled)}.")
            return self._marked(modelled)
        seconds, limit_bytes = self.method.profile_seconds, modelled.memory.limit_bytes
        self.measuring = Measuring(device, self.database, seconds, limit_bytes, self.say)
        self.blocks = blocks_of(self.traced.graph)
        self.rows: list[Measured] = []
        best, self.step_s = modelled, None
        self.steps: dict[int, Step] = {}  # programs on the devices of the mesh, by the identity of their plans
        try:
            with my_turn(self.say):
                self.measuring.begin()
                best = self._fitting(self._improve(modelled))
                self.step_s = self.step_s or self._step_s(best)
                if self.measuring.is_over:
                    self.remarks.append(
                        f"Not everything was measured within {format_seconds(seconds)}; more time measures more."
                    )
        except KeyboardInterrupt:
            self.remarks.append("Measuring was interrupted; the plan uses what was measured until then.")
        self.remarks += dict.fromkeys(self.measuring.remarks)
        keep_work(self.database, self.rows, self.traced.graph, self._corrections().collectives)
        return self._priced(best)

    def _improve(self, modelled: PlanData) -> PlanData:
        self._measure_first(modelled)
        others = self._others(modelled)
        self._measure(others)
        solved: list[PlanData] = []
        for _ in range(MOST_ROUNDS):
            solved.append(self._solve(self.method, self.meshes, self._corrections()))
            if self.measuring.is_over or not self._measure(solved[-1:]):
                break
        found = self._cheapest([*solved[::-1], modelled, *others])
        if any(found is one for one in others):  # which has no bound over the plans of all methods
            found = replace(found, method=self.method.name, solution=solved[-1].solution)
        return self._faster(modelled, found)

    def _measure_first(self, modelled: PlanData) -> None:
        """Measures the model's plan, which is the plan if nothing better is found in time.

        The whole step is compiled before the parts, in at most half of the time: XLA chooses kernels by timing them
        while it compiles, once in a process, and no other program may disturb that. As much time as it took is kept for
        the step of another plan; for one device there is no other.
        """
        measuring = self.measuring
        started, measuring.kept_s = time.perf_counter(), measuring.left_s / 2
        if self._is_here(modelled):
            with suppress(TimeoutError, jax.errors.JaxRuntimeError):  # said where it matters: in `_faster`
                self._compiled(modelled)
        else:
            measuring.measure([self._step(modelled)])
        measuring.kept_s = time.perf_counter() - started if modelled.mesh.num_devices > 1 else 0.0
        self._memory_bytes(modelled)
        self._measure([modelled])

    def _fitting(self, found: PlanData) -> PlanData:
        """A plan whose program needs no more memory than is allowed, where its own was found to need more."""
        for _ in range(MOST_ROUNDS):
            limit, num_bytes = found.memory.limit_bytes, self._memory_bytes(found)
            if limit is None or num_bytes is None or num_bytes <= limit or self.measuring.is_over:
                break
            try:
                following = self._solve(self.method, self.meshes, self._corrections())
            except DoesNotFit as error:
                self.remarks.append(f"Its program needs {format_bytes(num_bytes)}, more than is allowed: {error}")
                break
            if following.ops == found.ops:
                break
            found, self.step_s = following, None
            if self._is_here(found):
                self._compiled(found)
            else:
                self.step_s = self._step_s(found)
        return found

    def _memory_bytes(self, plan: PlanData) -> int | None:
        """What the program of a plan's step allocates on a device, if it was compiled; later plans count with it."""
        if id(plan) in self.steps:
            num_bytes: int | None = self.steps[id(plan)].memory_bytes
        else:
            known = self.measuring.found.get(self._step(plan).key(self.measuring.device))
            num_bytes = None if known is None else known.memory_bytes
        if num_bytes:
            ratio = num_bytes / modelled_bytes(plan)
            self.bytes_factor = ratio if self.bytes_factor == 1 else max(self.bytes_factor, ratio)
            keep_memory(self.database, plan, self.traced, num_bytes, modelled_bytes(plan))
        return num_bytes

    def _cheapest(self, plans: Sequence[PlanData]) -> PlanData:
        """The plan that takes the least time by what was measured, and by the corrected model where nothing was."""
        corrected = self._corrections()

        def price_s(plan: PlanData) -> float:
            return sum(compute_s(self._known(plan), corrected)) + communication_s(plan, corrected)

        return min(plans, key=price_s)

    def _faster(self, modelled: PlanData, found: PlanData) -> PlanData:
        """Of the model's plan and another the one whose program is faster, where their devices are here."""
        self.measuring.kept_s = 0.0
        if not self._is_here(found):
            return found
        plans = [modelled] if found.ops == modelled.ops else [modelled, found]
        try:
            times = step_times([self._compiled(plan) for plan in plans])
        except (jax.errors.JaxRuntimeError, TimeoutError) as error:
            reason = " ".join(str(error).split())[:200] or "there was no time to compile them"
            if len(plans) > 1:
                self.remarks.append(f"The model's plan is kept, since both plans could not be run ({reason}).")
            return modelled
        self.step_s = min(times)
        return plans[times.index(self.step_s)]

    def _compiled(self, plan: PlanData) -> Step:
        """A plan's program on the devices of the mesh; it is compiled once.

        Raises:
            TimeoutError: There is no time left to compile it.
            jax.errors.JaxRuntimeError: It cannot be compiled.
        """
        if id(plan) not in self.steps:
            self.say("compiling the whole step")
            self.steps[id(plan)] = compiled_in(max(self.measuring.left_s, 0.0), plan, self.traced)
        return self.steps[id(plan)]

    def _step(self, plan: PlanData) -> StepCandidate:
        return StepCandidate(plan, self.traced, step_of(plan, self.traced.graph))

    def _step_s(self, plan: PlanData) -> float | None:
        """Seconds of one device's share of the whole step; None where there is no time for it or it cannot run."""
        if self._is_here(plan):
            return None
        step = self._step(plan)
        found = self.measuring.measure([step]).get(step.key(self.measuring.device))
        compute = Measured(plan, step.part, found).compute_s()
        return None if compute is None else compute + communication_s(plan, self._corrections())

    def _solve(self, method: Any, meshes: list[Mesh], corrected: Corrections | None) -> PlanData:
        return plan_program(self.traced, meshes, method, self.say, Budget(method.seconds), corrected)

    def _corrections(self) -> Corrections:
        found = corrections(self.rows, None if self.calibrated is None else self.calibrated.usual)
        return replace(
            found, memory=self.bytes_factor, alone=True, about="" if self.calibrated is None else self.calibrated.about
        )

    def _others(self, modelled: PlanData) -> list[PlanData]:
        """Plans by other methods on the same mesh."""
        found = []
        if modelled.mesh.num_devices > 1:
            for method in NAMED:
                if self.measuring.is_over:
                    break
                try:
                    fraction = self.method.memory_fraction
                    found.append(
                        self._solve(replace(method, memory_fraction=fraction), [modelled.mesh], self.calibrated)
                    )
                except (DoesNotFit, ShardingError):
                    continue
            found += self._combinations(modelled)
        return found

    def _combinations(self, modelled: PlanData) -> list[PlanData]:
        """Plans with other splits of the blocks of the segments that take most of the time."""
        parts = parts_of(modelled, self.traced.graph, self.blocks)
        whole_s = sum(part.count * part.modelled_s for part in parts)
        shares = {part.fingerprint: part.count * part.modelled_s / whole_s for part in parts if part.is_segment}
        large = [s for s in self.blocks.segments if shares.get(s.fingerprint, 0.0) >= LARGE]
        fixed, found = FixedSplits(memory_fraction=self.method.memory_fraction), list[PlanData]()
        for segment in large:
            seconds = self.measuring.left_s / 2 / len(large)  # the other half is left to measure them
            where = (self.traced, self.blocks, segment, modelled.mesh)
            found += [one.plan for one in some_combinations(*where, MOST_PLANNED, seconds, self.say, fixed)[0]]
        return found

    def _measure(self, plans: Sequence[PlanData]) -> bool:
        """Measures the parts of plans that are worth it; whether any was not known before."""
        parts = [(plan, parts_of(plan, self.traced.graph, self.blocks)) for plan in plans]
        wanted = self._chosen([(plan, part) for plan, all_of_it in parts for part in _worth(plan, all_of_it)])
        candidates = [Candidate(plan, self.traced, part, self._mesh(plan)) for plan, part in wanted]
        before = self.measuring.num_measured
        try:
            self.measuring.measure(candidates)
        finally:  # an interrupt, too, leaves what was measured
            self._learn(candidates)
        return self.measuring.num_measured > before

    def _learn(self, candidates: Sequence[Candidate]) -> None:
        """Notes what is known of candidates by now."""
        known = {(row.plan.mesh.sizes, row.part.fingerprint, row.part.shardings) for row in self.rows}
        new = []
        for c in candidates:
            place = c.plan.mesh.sizes, c.part.fingerprint, c.part.shardings
            found = self.measuring.found.get(c.key(self.measuring.device))
            if found is not None and place not in known:
                known.add(place)
                new.append(Measured(c.plan, c.part, found))
        self.rows += new

    def _chosen(self, pairs: list[tuple[PlanData, MeasuredPart]]) -> list[tuple[PlanData, MeasuredPart]]:
        """Of each segment's candidates the cheapest by the model, and a few of the others."""
        by_segment: dict[str, dict[str, tuple[PlanData, MeasuredPart]]] = {}
        for plan, part in sorted(pairs, key=lambda pair: pair[1].modelled_s + pair[1].communication_s):
            by_segment.setdefault(part.fingerprint, {}).setdefault(part.shardings, (plan, part))
        found = []
        for some in by_segment.values():
            ranked = list(some.values())
            rest = ranked[MOST_CANDIDATES:]
            found += ranked[:MOST_CANDIDATES] + rest[:: max(1, len(rest) // EXPLORERS)][:EXPLORERS]
        return found

    def _device(self, plan: PlanData) -> jax.Device | None:
        chip = plan.mesh.chip
        return next((d for d in jax.local_devices() if chip is not None and d.device_kind in chip.device_kinds), None)

    def _is_here(self, plan: PlanData) -> bool:
        """Whether all devices of a plan's mesh are in this process."""
        return 1 < plan.mesh.num_devices <= len(jax.local_devices()) and jax.process_count() == 1

    def _mesh(self, plan: PlanData) -> jax.sharding.Mesh | None:
        return device_mesh(plan) if self._is_here(plan) else None

    def _known(self, plan: PlanData) -> list[Measured]:
        """The parts of a plan with what was measured of them."""
        parts = parts_of(plan, self.traced.graph, self.blocks)
        known = {(row.plan.mesh.sizes, row.part.fingerprint, row.part.shardings): row.found for row in self.rows}
        return [Measured(plan, part, known.get((plan.mesh.sizes, part.fingerprint, part.shardings))) for part in parts]

    def _priced(self, plan: PlanData) -> PlanData:
        """The plan with measured compute where it was measured, and corrected compute elsewhere."""
        corrected = self._corrections()
        measured, modelled = compute_s(self._known(plan), corrected)
        sent = communication_s(plan, corrected)
        how = "on the devices of the mesh" if self._mesh(plan) is not None else "as one device's share"
        whole = ""
        if self.step_s is not None:
            parts_s = f"; its parts by themselves {format_seconds(measured)}" if measured else ""
            whole = f" in the whole step{parts_s}"
            measured, modelled = max(self.step_s - sent, 0.0), 0.0
        if not measured:
            self.remarks.append("Nothing was measured; all prices are modelled.")
            return self._marked(plan)
        cost = Cost(measured + modelled, sent)
        if self.step_s is not None and self._is_here(plan):  # with its communication, so nothing is to be simulated
            cost = replace(cost, step=self.step_s, waiting=min(sent, self.step_s))
        scale = cost.total / plan.cost.total if plan.cost.total else 1.0
        solution = SolutionSummary.proven(
            cost.total, plan.solution.lower_bound * scale, plan.solution.seconds, plan.solution.folded
        )
        about = (
            f"measured {how}: {format_seconds(measured)} of compute{whole}; modelled: {format_seconds(modelled)} of "
            f"compute, {format_seconds(sent)} of communication{_told(plan, sent)}; "
            f"{plan.flops / cost.total / 1e12:.4g} TFLOP/s a device"
        )
        self.remarks.append(f"{about[0].upper()}{about[1:]}.")
        provenance = {**plan.provenance, "profile": about}
        num_bytes = self._memory_bytes(plan)
        plan = replace(plan, cost=cost, solution=solution, provenance=provenance)
        return self._marked(plan if num_bytes is None else with_memory(plan, num_bytes))

    def _marked(self, plan: PlanData) -> PlanData:
        return replace(plan, remarks=(*plan.remarks, *self.remarks))


def _worth(plan: PlanData, parts: Sequence[MeasuredPart]) -> list[MeasuredPart]:
    """The parts that take so much of a plan's compute or of its communication that they are measured."""
    compute_s, sent_s = sum(part.count * part.modelled_s for part in parts), plan.cost.communication
    return [
        part
        for part in parts
        if part.count * part.modelled_s > WORTH * compute_s or part.count * part.communication_s > WORTH * sent_s
    ]


def _told(plan: PlanData, sent_s: float) -> str:
    """How far the model of collectives was from what was measured."""
    modelled = communication_s(plan, Corrections())
    times = f"{sent_s / modelled:.3g}" if modelled else "1"
    return f" ({times} times the uncorrected model's)" if times != "1" else ""


def _chip(plan: PlanData) -> str:
    return "device of an abstract mesh" if plan.mesh.chip is None else plan.mesh.chip.name
