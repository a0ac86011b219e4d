"""Measures candidates: parts of plans, each compiled as a program of its own and timed beside a reference program.

Programs are compiled by several threads and timed one by one, the most promising first. The reference program runs in
every round: a round in which it is slow was disturbed, and is repeated. A candidate that is far slower than the best of
its segment is abandoned after its first round. A part that an accelerator finishes before the host has started the next
run is compiled once more, as a loop: else the time would be the host's. Every result is in the database before the next
is measured, so that an interrupt loses nothing; so are failures, which are not tried again.

The time limit holds whatever XLA does: a program that is not compiled when the time is over is not waited for.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh as DeviceMesh

from meshwright.graph.tracing.trace import Traced
from meshwright.plans.plan import PlanData
from meshwright.profiler.measurements import Database, Key, Measurement, measured_now, this_compiler
from meshwright.progress import Say
from meshwright.rehearsal.parts import MeasuredPart
from meshwright.rehearsal.share.part_program import PartFunction, PartProgram, TooLarge, refuse_large
from meshwright.rehearsal.share.program import Share
from meshwright.runtime.checking.verify import allocated_bytes
from meshwright.units import format_seconds

HOPELESS = 1.15  # a candidate that takes so many times the best of its segment is not timed further
DISTURBED = 1.1  # a round in which the reference takes so many times its best is not counted
ROUNDS = 4
MOST_ROUNDS = 10
ROUND_S = 0.05  # a round repeats a program until it lasts about so long
# Real steps follow each other for long. On an H200, whole steps in short rounds came out up to 4% off on five models,
# and in rounds of this length within 0.3% on the four that were timed so.
STEP_ROUND_S = 0.3
LEAST_RUNS, MOST_RUNS = 4, 50  # of a round: runs queue up on the device, so that starting one is hidden by another

Compiling = tuple[Key, "Candidate", Future[PartProgram]]


class TooShort(Exception):
    """A part that the host does not start as quickly as it runs."""


@dataclass(frozen=True)
class Candidate:
    """A part of a plan to be measured.

    Attributes:
        plan: The plan that it is a part of.
        traced: The plan's traced program.
        part: The part.
        mesh: The devices to measure it on with its collectives; None to rehearse it on one.
    """

    plan: PlanData
    traced: Traced
    part: MeasuredPart
    mesh: DeviceMesh | None = None

    @property
    def price_s(self) -> float:
        """Its modelled price: the candidates of a segment are measured in this order."""
        return self.part.modelled_s + self.part.communication_s

    @property
    def kind(self) -> str:
        return "rehearsed" if self.mesh is None else "whole"

    def key(self, device: Any) -> Key:
        """What it is looked up by, if measured on a device."""
        cluster = self.plan.mesh.cluster
        link = "" if self.mesh is None or cluster is None else f"{cluster.num_hosts}x{cluster.devices_per_host}"
        where = chip_name(self.plan, device)
        return Key(self.part.fingerprint, self.part.shardings, where, link, self.part.dtype, this_compiler())

    def compile(self, device: Any, limit_bytes: float | None = None, laps: int = 1) -> PartProgram:
        """Compiles it for a device or for its mesh; one run computes it as often as there are laps.

        Raises:
            TooLarge: The program needs more memory than the limit.
        """
        return PartFunction(self.plan, self.traced, self.part.operations, self.mesh).compile(device, limit_bytes, laps)


@dataclass(frozen=True)
class StepCandidate(Candidate):
    """A whole step to be rehearsed: one device's share of a plan, fused and started by the host as the real program."""

    def compile(self, device: Any, limit_bytes: float | None = None, laps: int = 1) -> PartProgram:
        """Compiles it for a device.

        Raises:
            TooLarge: The program needs more memory than the limit.
        """
        share = Share.of(self.plan, self.traced)
        compiled = share.compile(device)
        refuse_large(compiled, limit_bytes)
        return StepProgram(compiled, partial(share.draw, device), share=share)


@dataclass(frozen=True)
class StepProgram(PartProgram):
    """A compiled share of a step; what a run returns are the arguments of the next, since some are donated."""

    share: Share = field(kw_only=True)

    def run(self) -> list[jax.Array]:
        """Starts one step."""
        self.values[:] = self.share.step(self.compiled, self.values)
        return self.values


def in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates by their rank in their segment by the model, and by what they take in a step."""
    seen: dict[str, int] = {}
    ranked = []
    for candidate in sorted(candidates, key=lambda c: c.price_s):
        rank = seen[candidate.part.fingerprint] = seen.get(candidate.part.fingerprint, -1) + 1
        ranked.append((rank, -candidate.part.count * candidate.price_s, candidate))
    return [candidate for *_, candidate in sorted(ranked, key=lambda row: row[:2])]


def chip_name(plan: PlanData, device: Any) -> str:
    """The catalogue's name of the device, where it is the chip of the plan; else JAX's name."""
    chip = plan.mesh.chip
    return chip.name if chip is not None and device.device_kind in chip.device_kinds else str(device.device_kind)


class Measuring:
    """Measures candidates on a device and keeps the results.

    Attributes:
        device: The device that rehearses.
        database: Where results are kept.
        deadline: When to stop, by `time.perf_counter`; None for no limit.
        limit_bytes: Bytes that a candidate may need on a device; None for no limit.
        say: Called with the progress.
        fresh: Whether to measure again what is known.
        remarks: What could not be measured, a sentence each.
        found: All measurements by now.
        compile_s: Seconds that each candidate took to compile.
        kept_s: Seconds before the deadline that are kept for what is measured in the end.
    """

    def __init__(
        self,
        device: Any,
        database: Database,
        seconds: float | None = None,
        limit_bytes: float | None = None,
        say: Say = lambda _: None,
        fresh: bool = False,
    ):
        self.fresh = fresh
        self.device, self.database, self.say = device, database, say
        self.seconds = seconds
        self.begin()
        reported = (device.memory_stats() or {}).get("bytes_limit")
        self.limit_bytes = min((b for b in (reported, limit_bytes) if b), default=None)
        self.remarks: list[str] = []
        self.found: dict[Key, Measurement] = {}
        self.num_measured = 0
        self.compile_s: dict[Key, float] = {}
        self.kept_s = 0.0
        self._late: dict[Key, Future[PartProgram]] = {}  # begun, and not compiled when the time was over
        self._reference: PartProgram | None = None
        self._reference_s = float("inf")

    def begin(self) -> None:
        """Starts the clock anew: what was waited for another profiler does not count."""
        self.deadline = None if self.seconds is None else time.perf_counter() + self.seconds

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, less those that are kept."""
        return float("inf") if self.deadline is None else self.deadline - self.kept_s - time.perf_counter()

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    def measure(self, candidates: Sequence[Candidate]) -> dict[Key, Measurement]:
        """The measurements of candidates, from the database or made now; those for which there was no time are missing.

        The candidate of each segment that the model prefers comes first, large segments before small ones, then the
        second of each, and so on: if time is over, what matters most was measured.
        """
        wanted = {c.key(self.device): c for c in in_order(candidates)}
        found = {key: self.found[key] for key in wanted if key in self.found}
        for key, candidate in wanted.items():
            known = None if self.fresh else self.database.get(key, candidate.kind)
            if known is not None and not self._may_fit_now(known):
                found[key] = self.found[key] = known
        missing, laps = [(key, c) for key, c in wanted.items() if key not in found], 1
        while missing:
            short: list[tuple[Key, Candidate]] = []
            for number, (key, candidate, compiled) in enumerate(self._compiled(missing, laps)):
                self._progress(number, len(missing), candidate.part)
                try:
                    self._keep(self._measured(key, candidate, compiled, found), candidate, found)
                except TooShort:
                    short.append((key, candidate))
            missing, laps = short, MOST_RUNS  # starting so many at once is a small part of their time
        return found

    def _may_fit_now(self, known: Measurement) -> bool:
        """Whether a program that was too large for an earlier limit is allowed now."""
        if known.seconds is not None or known.memory_bytes is None:
            return False
        return self.limit_bytes is None or known.memory_bytes <= self.limit_bytes

    def _keep(self, made: Measurement, candidate: Candidate, found: dict[Key, Measurement]) -> None:
        found[made.key] = self.found[made.key] = made
        self.num_measured += 1
        if made.failure:
            label = candidate.part.label or "a part"
            self.remarks.append(f"A split of {label} could not be measured: {made.failure}")
        self.database.keep([made])

    def _compiled(self, missing: Sequence[tuple[Key, Candidate]], laps: int) -> Iterator[Compiling]:
        """Compiles in threads, in this order and in batches: nothing is timed while something compiles.

        Half of the time is left to time a batch. What is not compiled then, or when the time is over, goes on: it
        belongs to the next batch, or is there when it is asked for again.
        """
        todo, begun, pool = deque(missing), list[Compiling](), ThreadPoolExecutor(compiled_ahead())
        try:
            while (todo or begun) and not self.is_over:
                while todo and len(begun) < compiled_ahead():
                    key, candidate = todo.popleft()
                    future = self._late.pop(key, None) or pool.submit(self._compile, key, candidate, laps)
                    begun.append((key, candidate, future))
                self._wait([future for *_, future in begun])
                ready = deque(one for one in begun if one[-1].done())
                begun = [one for one in begun if not one[-1].done()]
                while ready and not self.is_over:
                    yield ready.popleft()  # and does not keep it: a program holds its arguments once it ran
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._late |= {key: future for key, _, future in begun if laps == 1 and not future.cancelled()}

    def _wait(self, futures: Sequence[Future[PartProgram]]) -> None:
        """Waits for programs until all are compiled or half of the time is over; for the first as long as there is."""
        if self.deadline is None:
            wait(futures)
        elif not wait(futures, max(self.left_s / 2, 0.0)).done:
            wait(futures, max(self.left_s, 0.0), FIRST_COMPLETED)

    def _compile(self, key: Key, candidate: Candidate, laps: int) -> PartProgram:
        started = time.perf_counter()
        try:
            return candidate.compile(self.device, self.limit_bytes, laps)
        finally:
            self.compile_s[key] = time.perf_counter() - started

    def _measured(
        self, key: Key, candidate: Candidate, compiled: "Future[PartProgram]", found: dict[Key, Measurement]
    ) -> Measurement:
        rivals = [m.seconds for k, m in found.items() if k.fingerprint == key.fingerprint and m.seconds]
        kind: Any = candidate.kind
        try:
            program = compiled.result()
            memory_bytes = allocated_bytes(program.compiled)
            seconds = self._time(program, min(rivals, default=float("inf")), isinstance(candidate, StepCandidate))
            return measured_now(key, kind, seconds, memory_bytes)
        except TooShort:
            raise
        except TooLarge as error:
            return measured_now(key, kind, None, int(error.needed), str(error))
        except Exception as error:  # of whatever kind: it is kept as the reason, and the other candidates are measured
            return measured_now(key, kind, None, None, " ".join(str(error).split())[:200] or type(error).__name__)

    def _time(self, program: PartProgram, best_s: float, is_step: bool = False) -> float:
        """Seconds of one run: the quickest undisturbed round.

        Raises:
            TooShort: A run of a part ends before the host has started the next, so that its time would be the host's.
        """
        jax.block_until_ready(program.run())
        runs = repeats(timed(program, 1), STEP_ROUND_S if is_step else ROUND_S)
        can_loop = self.device.platform != "cpu" and not is_step and program.laps == 1
        if can_loop and is_short(program, runs):
            raise TooShort
        found: list[float] = []
        for number in range(MOST_ROUNDS):
            reference_s = self._time_reference()
            seconds = timed(program, runs) / program.laps
            if reference_s <= DISTURBED * self._reference_s or number + ROUNDS >= MOST_ROUNDS:
                found.append(seconds)
            if len(found) >= ROUNDS or (found and (self.is_over or min(found) > HOPELESS * best_s)):
                break
        return min(found)

    def _time_reference(self) -> float:
        if self._reference is None:
            self._reference = reference_program(self.device)
            jax.block_until_ready(self._reference.run())
        seconds = timed(self._reference, 3)
        self._reference_s = min(self._reference_s, seconds)
        return seconds

    def _progress(self, number: int, total: int, part: MeasuredPart) -> None:
        left = "" if self.deadline is None else f", {format_seconds(max(self.left_s, 0))} left"
        self.say(f"measuring {number + 1} of {total}: {part.label or part.fingerprint}{left}")


def compiled_ahead() -> int:
    """How many programs are compiled at a time: two at least, so that a large one does not hold up all others."""
    return max(2, min(8, (os.cpu_count() or 1) // 2))


def reference_program(device: Any) -> PartProgram:
    """A product whose time shows whether something else uses the device."""
    rows, dtype = (256, "float32") if device.platform == "cpu" else (4096, "bfloat16")
    matrix = jax.device_put(jnp.ones((rows, rows), dtype), device)
    compiled = jax.jit(lambda x: x @ x).lower(matrix).compile()
    return PartProgram(compiled, lambda: [matrix])


def repeats(once_s: float, round_s: float = ROUND_S) -> int:
    """How often a program that takes some seconds runs in one round."""
    return int(min(max(round_s / max(once_s, 1e-9), LEAST_RUNS), MOST_RUNS))


def timed(program: PartProgram, runs: int) -> float:
    """Mean seconds of some runs in a row."""
    return sum(queued(program, runs)) / runs


def queued(program: PartProgram, runs: int) -> tuple[float, float]:
    """Seconds until some runs in a row have been started, and from then until the last is done."""
    began = time.perf_counter()
    made = None
    for _ in range(runs):
        made = program.run()
    started = time.perf_counter()
    jax.block_until_ready(made)
    return started - began, time.perf_counter() - started


def is_short(program: PartProgram, runs: int) -> bool:
    """Whether the host sets the pace: then the last run at most is left to do when it has been started."""
    start_s, wait_s = queued(program, runs)
    return wait_s <= (start_s + wait_s) / runs
