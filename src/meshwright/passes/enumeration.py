"""Measures every combination of a segment's strategies, and tells how well others predict the measured time.

Three predictors are held against the kernel time: the bytes that are sent, the planner's price, and the profile, which
is another measurement of the same program as the profile pass makes it. All programs are compiled first and timed in
turns, in rounds. Every other round belongs to the profile, the rest to the kernel time: so no run counts for both, and
what changes on the machine in the meantime changes both.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Group, RenderableType
from scipy.stats import rankdata

from meshwright.blocks import Blocks, Segment, blocks_of
from meshwright.console import Printed, Table, bare_table
from meshwright.errors import ShardingError
from meshwright.graph import Traced, trace
from meshwright.hardware import Cluster, Mesh
from meshwright.output import write_whole
from meshwright.profiler.measurements import Database, measured_now
from meshwright.profiler.measurements.turn import my_turn
from meshwright.progress import Say
from meshwright.rehearsal.combinations import Combination, choices_of, plan_combinations
from meshwright.rehearsal.measuring import Candidate, compiled_ahead, repeats, timed
from meshwright.rehearsal.share.part_program import PartFunction, PartProgram
from meshwright.runtime.checking.verify import allocated_bytes
from meshwright.runtime.spmd import device_mesh
from meshwright.units import format_bytes, format_seconds

PREDICTORS = {"sent_bytes": "bytes sent", "price_s": "planner's price", "profile_s": "profile"}
ROUNDS = 5  # of the profile, and of the kernel time


@dataclass(frozen=True, slots=True)
class CombinationRow:
    """One combination with what was predicted and measured of one run of the segment."""

    choices: str
    sent_bytes: float
    price_s: float
    profile_s: float
    kernel_s: float
    memory_bytes: int


@dataclass(frozen=True, repr=False)
class Enumeration(Printed):
    """What was found for one segment.

    Attributes:
        model: The name of the model.
        segment: The number of the segment.
        fingerprint: The segment's fingerprint.
        space: Its search space as a product.
        devices: The devices that measured.
        kind: ``whole`` with collectives, or ``rehearsed`` with modelled ones added.
        rows: A row for each combination that could be measured, the fastest first.
        num_combinations: How many were asked for.
        failures: Combinations that could not be compiled or run, with the reason.
        seconds: How long it took.
        num_rounds: How often each was timed, for the profile and for the kernel time; fewer after an interrupt.
    """

    model: str
    segment: int
    fingerprint: str
    space: str
    devices: str
    kind: str
    rows: tuple[CombinationRow, ...]
    num_combinations: int
    failures: tuple[tuple[str, str], ...]
    seconds: float
    num_rounds: int = ROUNDS

    def correlation(self, predictor: str) -> float:
        """Spearman's rank correlation of a predictor with the kernel time."""
        return rank_correlation([getattr(row, predictor) for row in self.rows], [row.kernel_s for row in self.rows])

    def regret(self, predictor: str) -> float:
        """How much slower the combination is that a predictor prefers; of those it holds equal, in the mean."""
        least = min(getattr(row, predictor) for row in self.rows)
        chosen = [row.kernel_s for row in self.rows if getattr(row, predictor) <= least * (1 + 1e-9)]
        return sum(chosen) / len(chosen) / min(row.kernel_s for row in self.rows) - 1

    def __repr__(self) -> str:
        return f"<Enumeration of {self.model}, segment {self.segment}: {len(self.rows)} of {self.num_combinations}>"

    def __rich__(self) -> RenderableType:
        head = (
            f"{self.model}, segment {self.segment} ({self.fingerprint[:8]}), search space {self.space}: "
            f"{len(self.rows)} of {self.num_combinations} combinations measured ({self.kind}) on {self.devices} in "
            f"{format_seconds(self.seconds)}"
        )
        if self.num_rounds < ROUNDS:
            head += f"; it was interrupted after {self.num_rounds} of {ROUNDS} rounds"
        return Group(head, "", self._summary(), "", self._table(), *self._failed())

    def _summary(self) -> Table:
        figures = "rank correlation with kernel time", "regret of choosing by it"
        table = bare_table("predictor", *figures, right=figures)
        for name, words in PREDICTORS.items():
            table.add_row(words, f"{self.correlation(name):.3f}", f"{self.regret(name):.1%}")
        return table

    def _table(self) -> Table:
        figures = "kernel time", "profile", "planner's price", "sent", "memory"
        table = bare_table("combination", *figures, right=figures)
        for row in self.rows:
            times = (format_seconds(s) for s in (row.kernel_s, row.profile_s, row.price_s))
            table.add_row(row.choices, *times, format_bytes(row.sent_bytes), format_bytes(row.memory_bytes))
        return table

    def _failed(self) -> list[str]:
        return [f"{choices} could not be measured: {reason}" for choices, reason in self.failures[:5]]

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the correlations and regrets."""
        data = asdict(self)
        data["predictors"] = {
            name: {"words": words, "correlation": self.correlation(name), "regret": self.regret(name)}
            for name, words in PREDICTORS.items()
        }
        return data


def write_page(found: Enumeration, path: Path) -> None:
    """Writes one self-contained web page with the plots and the table."""
    template = resources.files("meshwright.passes").joinpath("assets", "enumeration.html").read_text(encoding="utf-8")
    # Inside a script HTML knows "</script", "<script" and "<!--": none is left where no "<" is.
    data = json.dumps(found.to_json(), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    write_whole(path, template.replace("{{data}}", data.replace("NaN", "null")))


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share their mean rank. NaN where either is constant.

    >>> rank_correlation([1, 2, 3, 3], [10, 20, 30, 40])
    0.9486832980505138
    """
    ranks = [rankdata(values) for values in (one, other)]
    if any(np.ptp(r) == 0 for r in ranks):
        return float("nan")
    return float(np.corrcoef(*ranks)[0, 1])


def enumerate_segment(
    function: Callable[..., Any],
    *args: Any,
    segment: int,
    cluster: Cluster,
    database: Database,
    sample: int | None = None,
    model: str = "",
    say: Say = lambda _: None,
) -> Enumeration:
    """Measures the combinations of one segment's strategies on the devices of a cluster.

    An interrupt after the first round ends the timing: the rounds until then count.

    Args:
        function: A train step or a forward pass.
        *args: Its arguments or their types.
        segment: The number of the segment, as `mw.find_blocks` numbers them.
        cluster: The cluster; where its devices are not here, one device rehearses and communication is modelled.
        database: Where the profile is kept.
        sample: Measure a fixed random sample of so many combinations, where there are more.
        model: The name of the model, for the table.
        say: Called with the progress.

    Raises:
        ShardingError: There is no such segment, or there is nothing to split.
    """
    started = time.perf_counter()
    traced = trace(function, *args, cluster=cluster)
    blocks = blocks_of(traced.graph)
    mesh = cluster.mesh((cluster.num_devices,))
    one = _segment(blocks, segment, mesh)
    study = _Study(traced, mesh, database, say)
    choices = choices_of(blocks, one, sample)
    study.compile_all(list(plan_combinations(traced, blocks, one, mesh, choices, say)))
    with my_turn(say):
        rows = study.time_all()
    return Enumeration(
        model,
        segment,
        one.fingerprint,
        one.space,
        f"{mesh.num_devices} × {study.device.device_kind}" if study.devices else str(study.device.device_kind),
        "whole" if study.devices else "rehearsed",
        tuple(sorted(rows, key=lambda row: row.kernel_s)),
        len(choices),
        tuple(study.failures),
        time.perf_counter() - started,
        study.num_rounds,
    )


def _segment(blocks: Blocks, number: int, mesh: Mesh) -> Segment:
    if not 0 <= number < len(blocks.segments):
        raise ShardingError(f"segment is {number}; the program has segments 0 to {len(blocks.segments) - 1}")
    if mesh.num_devices < 2:
        raise ShardingError(
            "there is one device, over which nothing can be split: name a cluster such as '1x8 h100' to rehearse, or "
            "set XLA_FLAGS=--xla_force_host_platform_device_count=8 for virtual devices"
        )
    return blocks.segments[number]


class _Study:
    """Compiles combinations and times them in turns."""

    def __init__(self, traced: Traced, mesh: Mesh, database: Database, say: Say):
        self.traced, self.database, self.say = traced, database, say
        here = 1 < mesh.num_devices <= len(jax.local_devices())
        self.devices = here and jax.local_devices()[0].device_kind in (mesh.chip.device_kinds if mesh.chip else ())
        self.device = jax.local_devices()[0]
        self.programs: list[tuple[Combination, Candidate, PartProgram]] = []
        self.failures: list[tuple[str, str]] = []
        self.num_rounds = 0

    def compile_all(self, combinations: Sequence[Combination]) -> None:
        """Compiles, several at a time; a combination that XLA refuses or cannot run is noted and left out."""
        candidates = [self._candidate(one) for one in combinations]
        with ThreadPoolExecutor(compiled_ahead()) as pool:
            compiled = [pool.submit(self._compile, candidate) for candidate in candidates]
            for number, (one, program) in enumerate(zip(combinations, compiled, strict=True)):
                self.say(f"compiling combination {number + 1} of {len(combinations)}: {one.name}")
                program.exception()
        for one, candidate, program in zip(combinations, candidates, compiled, strict=True):
            try:  # nothing runs while something compiles: on virtual devices collectives would wait too long
                jax.block_until_ready(program.result().run())
                self.programs.append((one, candidate, program.result()))
            except Exception as error:  # of whatever kind: it is printed as the reason
                self.failures.append((one.name, " ".join(str(error).split())[:200] or type(error).__name__))

    def _candidate(self, one: Combination) -> Candidate:
        return Candidate(one.plan, self.traced, one.part, device_mesh(one.plan) if self.devices else None)

    def _compile(self, candidate: Candidate) -> PartProgram:
        function = PartFunction(candidate.plan, candidate.traced, candidate.part.operations, candidate.mesh)
        return function.compile(self.device)

    def time_all(self) -> list[CombinationRow]:
        """Times all programs in rounds, alternately for the profile, which is kept, and for the kernel times."""
        if not self.programs:
            raise ShardingError(f"no combination could be measured; the first failed so: {self.failures[:1]}")
        runs = [repeats(timed(p, 1)) for _, _, p in self.programs]
        profile, kernel = ([float("inf")] * len(runs) for _ in range(2))
        try:
            for number in range(ROUNDS):
                for what, times in (("profile", profile), ("kernel times", kernel)):
                    self.say(f"timing {what}: round {number + 1} of {ROUNDS}")
                    self._round(runs, times)
                self.num_rounds += 1
        except KeyboardInterrupt:
            if not self.num_rounds:
                raise
        for (_, candidate, program), seconds in zip(self.programs, profile, strict=True):
            kind: Any = candidate.kind
            key = candidate.key(self.device)
            self.database.keep([measured_now(key, kind, seconds, allocated_bytes(program.compiled))])
        return [
            self._row(one, program, p, k)
            for (one, _, program), p, k in zip(self.programs, profile, kernel, strict=True)
        ]

    def _row(self, one: Combination, program: PartProgram, profile_s: float, kernel_s: float) -> CombinationRow:
        beside = 0.0 if self.devices else one.part.communication_s - one.part.stand_in_s
        memory = allocated_bytes(program.compiled)
        return CombinationRow(one.name, one.sent_bytes, one.price_s, profile_s + beside, kernel_s + beside, memory)

    def _round(self, runs: Sequence[int], times: list[float]) -> None:
        """A turn of each program; the quickest counts, since whatever else runs on the machine only adds to a time."""
        for place, (_, _, program) in enumerate(self.programs):
            times[place] = min(times[place], self._turn(program, runs[place]))

    def _turn(self, program: PartProgram, runs: int) -> float:
        """Seconds of one run: on CPUs the quickest run, elsewhere the mean, since runs queue up on the device."""
        if self.device.platform == "cpu":
            return min(timed(program, 1) for _ in range(runs))
        return timed(program, runs)
