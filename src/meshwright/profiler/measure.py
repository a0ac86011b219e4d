"""Times probes: in rounds over all of them, so that a busy moment of the machine spoils no single one."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import jax

from meshwright import jax_devices
from meshwright.profiler.probes import probes
from meshwright.profiler.survey import Machine, Reading, Survey
from meshwright.progress import Say

LEAST_ROUNDS = 8  # while there is time
MOST_ROUNDS = 20  # a busy machine may need many to show a quick run
RUN_S = 4e-3  # one run lasts about so long
ENOUGH_S = 8.0  # no more than the least rounds begin after that
COMPILE_S = 10.0  # probes that are not compiled by then are left out
BUDGET_S = 14.0  # no round begins after that, but for two
MOST_TRIPS = 1000
LEAST_S = 1e-9


@dataclass
class _Run:
    """A program, the trips of its runs, and the quickest run without trips and with them."""

    probe: Any
    program: Callable[[int], Any]
    trips: int = 1
    idle_s: float = float("inf")
    busy_s: float = float("inf")
    rounds: int = 0

    def time(self, clock: Callable[[], float]) -> None:
        """One more run of each, with more trips if the start of the program dominates."""
        self.idle_s = min(self.idle_s, _timed(self.program, 0, clock))
        self.busy_s = min(self.busy_s, _timed(self.program, self.trips, clock))
        self.rounds += 1

    def lengthen(self, clock: Callable[[], float]) -> bool:
        """Makes more trips, and times them, where a run does not last long enough; whether it did not."""
        spent_s = jax_devices.of_first_process(self.busy_s - self.idle_s)
        wanted_s = jax_devices.of_first_process(max(RUN_S, 3 * self.idle_s))
        if spent_s >= wanted_s / 2 or self.trips >= MOST_TRIPS:
            return False
        growth = min(max(wanted_s / max(spent_s, wanted_s / 8), 2), 8)
        self.trips, self.busy_s, self.rounds = min(round(self.trips * growth), MOST_TRIPS), float("inf"), 0
        self.time(clock)
        return True

    def reading(self) -> Reading:
        probe, repeats = self.probe, self.trips * self.probe.unroll
        seconds = max((self.busy_s - self.idle_s) / repeats, LEAST_S)
        where = (probe.dtype, probe.size, probe.across)
        return Reading(probe.what, probe.amount, seconds, *where, repeats, self.rounds, probe.flops)


def measure(machine: Machine, say: Say = lambda _: None) -> Survey:
    """Measures the machine; with several processes all of them must do so together.

    It does so in a thread of its own, which knows nothing of a mesh that the caller has set, of a function that it
    traces, or of transfers that it guards.

    Args:
        machine: This machine.
        say: Called with a word on each stage.
    """
    started, load = time.perf_counter(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    with ThreadPoolExecutor(1) as pool:
        readings = pool.submit(_readings, machine, say).result()
    took_s = round(time.perf_counter() - started, 1)
    return Survey(machine, date.today().isoformat(), took_s, round(load, 1), _memory_bytes(machine), readings)


def _readings(machine: Machine, say: Say) -> tuple[Reading, ...]:
    with jax.disable_jit(False), jax.transfer_guard("allow"):  # whatever holds for all threads
        return time_probes(probes(machine), say=say)


def time_probes(
    wanted: Sequence[Any],
    *,
    clock: Callable[[], float] = time.perf_counter,
    say: Say = lambda _: None,
    rounds: int = MOST_ROUNDS,
    patience: float = 1.0,
) -> tuple[Reading, ...]:
    """Times each probe by the quickest of several runs.

    The first process makes the decisions that depend on the clock, so that all processes run the same programs.

    Args:
        wanted: The probes, in order of importance; those without time are left out.
        clock: Seconds.
        say: Called with a word on each stage.
        rounds: How many runs of each, at most.
        patience: By how much it may take longer than a user would wait.
    """
    started = clock()
    elapsed: Callable[[], float] = lambda: jax_devices.of_first_process((clock() - started) / patience)  # noqa: E731
    runs: list[_Run] = []
    for number, probe in enumerate(wanted):
        if runs and elapsed() > COMPILE_S:
            break
        say(f"compiling {number + 1} of {len(wanted)}: {probe.what.replace('_', '-')}")
        runs.append(_Run(probe, probe.compile()))
        _timed(runs[-1].program, 1, clock)  # compiles
        runs[-1].time(clock)
        while runs[-1].lengthen(clock):
            pass
    for number in range(rounds):
        if number > 1 and elapsed() > (BUDGET_S if number < LEAST_ROUNDS else ENOUGH_S):
            break
        say(f"timing {len(runs)} programs, round {number + 1} of {rounds}")
        for run in runs:
            run.time(clock)
            if number < LEAST_ROUNDS // 2:  # by then a busy moment may have passed for a long run
                run.lengthen(clock)
    return tuple(run.reading() for run in runs)


def _timed(program: Callable[[int], Any], trips: int, clock: Callable[[], float]) -> float:
    started = clock()
    jax.block_until_ready(program(trips))
    return clock() - started


def _memory_bytes(machine: Machine) -> int | None:
    """Memory of one device: the figure of its driver, or its share of the host's memory."""
    reported = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if reported or machine.platform != "cpu":
        return int(reported) if reported else None
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit = Path("/sys/fs/cgroup/memory.max")
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            total = min(total, int(text))
    except (OSError, ValueError, AttributeError):
        return None
    return total // machine.devices_per_process
