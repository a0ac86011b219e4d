"""The profile pass: of every unique segment, the most promising combinations of strategies are measured."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Group, RenderableType

from meshwright.blocks import Blocks, Segment
from meshwright.console import Printed, bare_table
from meshwright.graph import Traced
from meshwright.hardware import Mesh
from meshwright.profiler.measurements import Database, Measurement
from meshwright.profiler.measurements.turn import my_turn
from meshwright.progress import Say
from meshwright.rehearsal.combinations import Combination, choices_of, some_combinations
from meshwright.rehearsal.measuring import Candidate, Measuring
from meshwright.rehearsal.search import EXPLORERS, MOST_CANDIDATES
from meshwright.runtime.spmd import device_mesh
from meshwright.units import format_bytes, format_seconds

MOST_PLANNED = 100  # combinations of one segment that are planned and ranked; of more, a random sample


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One combination that was chosen to be measured; without a measurement where there was no time for it."""

    segment: int
    choices: str
    price_s: float
    found: Measurement | None


@dataclass(frozen=True, repr=False)
class Profile(Printed):
    """What the profile pass found.

    Attributes:
        segments: The unique segments.
        rows: The combinations that were measured, by segment, the fastest first.
        num_known: How many of them the database knew before.
        remarks: What a reader should know, a sentence each.
        seconds: How long it took.
    """

    segments: tuple[Segment, ...]
    rows: tuple[ProfileRow, ...]
    num_known: int
    remarks: tuple[str, ...]
    seconds: float

    def __repr__(self) -> str:
        return f"<Profile: {len(self.rows)} combinations of {len(self.segments)} segments>"

    def __rich__(self) -> RenderableType:
        figures = "time", "memory", "planner's price"
        table = bare_table("segment", "search space", "combination", *figures, "measured as", right=figures)
        for number, segment in enumerate(self.segments):
            first = f"{number} {segment.fingerprint[:8]}", f"{segment.space} = {segment.num_combinations}"
            for row in (row for row in self.rows if row.segment == number):
                table.add_row(*first, row.choices, *_measured(row.found), format_seconds(row.price_s), _kind(row.found))
                first = "", ""
        earlier = f", {self.num_known} of them known before" if self.num_known else ""
        head = f"{len(self.rows)} combinations of {len(self.segments)} unique segments{earlier}"
        return Group(f"{head}; it took {format_seconds(self.seconds)}", "", table, *self.remarks)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "rows": [
                {
                    "segment": row.segment,
                    "fingerprint": self.segments[row.segment].fingerprint,
                    "space": self.segments[row.segment].space,
                    "choices": row.choices,
                    "price_s": row.price_s,
                    "measurement": None if row.found is None else row.found.to_json(),
                }
                for row in self.rows
            ],
            "seconds": self.seconds,
            "remarks": list(self.remarks),
        }


def _measured(found: Measurement | None) -> tuple[str, str]:
    if found is None:
        return "not measured", "-"
    memory = "-" if found.memory_bytes is None else format_bytes(found.memory_bytes)
    return found.failure[:40] if found.seconds is None else format_seconds(found.seconds), memory


def _kind(found: Measurement | None) -> str:
    return "" if found is None else found.kind


def profile_segments(
    traced: Traced, blocks: Blocks, mesh: Mesh, database: Database, seconds: float, say: Say
) -> Profile:
    """Measures the most promising combinations of every unique segment on a mesh.

    An interrupt ends the pass, and so does the end of the time: what was measured until then is kept and returned.

    Args:
        traced: The program.
        blocks: Its blocks.
        mesh: The mesh that combinations are for; where its devices are not here, one device rehearses.
        database: Where measurements are kept.
        seconds: The time that measuring may take.
        say: Called with the progress.
    """
    started = time.perf_counter()
    device = _device(mesh)
    if device is None:
        chip = "the chip of the cluster" if mesh.chip is None else mesh.chip.name
        remark = f"Nothing was measured: no device here is a {chip}; prices are modelled."
        return Profile(blocks.segments, (), 0, (remark,), time.perf_counter() - started)
    rows: list[ProfileRow] = []
    remarks: list[str] = []
    measuring = Measuring(device, database, seconds, None, say)
    try:
        with my_turn(say):
            measuring.begin()
            for number, segment in enumerate(blocks.segments):
                share = measuring.left_s / (len(blocks.segments) - number) / 2  # the other half is left to measure them
                planned, tried = some_combinations(traced, blocks, segment, mesh, MOST_PLANNED, share, say)
                rows += _rows(number, traced, _promising(planned), measuring)
                if tried < min(len(choices_of(blocks, segment, MOST_PLANNED)), MOST_PLANNED):
                    remarks.append(
                        f"Of segment {number}, {tried} of {segment.space} combinations were priced in the time."
                    )
    except KeyboardInterrupt:
        remarks.append("Measuring was interrupted; what was measured until then is kept.")
    if any(row.found is None for row in rows):
        remarks.append(f"Measuring stopped after {format_seconds(seconds)}; run it again to go on.")
    num_known = sum(row.found is not None for row in rows) - measuring.num_measured
    remarks += dict.fromkeys(measuring.remarks)
    return Profile(blocks.segments, tuple(rows), max(num_known, 0), tuple(remarks), time.perf_counter() - started)


def _device(mesh: Mesh) -> jax.Device | None:
    kinds = () if mesh.chip is None else mesh.chip.device_kinds
    return next((device for device in jax.local_devices() if device.device_kind in kinds), None)


def _promising(planned: Sequence[Combination]) -> list[Combination]:
    """The combinations that are cheapest by the model, and a few of the others."""
    ranked = sorted(planned, key=lambda one: one.price_s)
    rest = ranked[MOST_CANDIDATES:]
    return ranked[:MOST_CANDIDATES] + rest[:: max(1, len(rest) // EXPLORERS)][:EXPLORERS]


def _rows(number: int, traced: Traced, chosen: Sequence[Combination], measuring: Measuring) -> list[ProfileRow]:
    candidates = [Candidate(one.plan, traced, one.part, _mesh(one)) for one in chosen]
    measurements = measuring.measure(candidates)
    rows = [
        ProfileRow(number, one.name, one.price_s, measurements.get(candidate.key(measuring.device)))
        for one, candidate in zip(chosen, candidates, strict=True)
    ]
    return sorted(rows, key=lambda row: _time(row.found))


def _time(found: Measurement | None) -> float:
    return float("inf") if found is None or found.seconds is None else found.seconds


def _mesh(one: Combination) -> jax.sharding.Mesh | None:
    here = 1 < one.plan.mesh.num_devices <= len(jax.local_devices()) and jax.process_count() == 1
    return device_mesh(one.plan) if here else None
