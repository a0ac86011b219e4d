"""What steps were found to need of memory, kept so that the next plan of the same program counts with it.

A rehearsal and a profile compile one device's share of a step, and XLA says what it allocates. Measured ÷ modelled
bytes is a property of the program more than of its split: XLA stores the same values under another. So every plan of
the program is corrected by the largest ratio that is known of it, and solved under a limit to match. A program that
recomputation or microbatches change has ratios of its own; until one is known, those of the step as it was written and
of its other changes count, or each change that a search tries would be believed to need what the model says.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from meshwright.graph import Traced
from meshwright.hardware import Chip
from meshwright.plans.plan import PlanData
from meshwright.profiler.database import cache_folder
from meshwright.profiler.local import SETTING
from meshwright.profiler.measurements import Database, Key, measured_now, open_database, this_compiler
from meshwright.profiler.measurements.database import FILE_NAME
from meshwright.rehearsal.parts import program_of, step_of

MEMORY = "memory "  # begins the fingerprint of a row that says what a whole step needed
_MODEL = 1  # the version of the model of memory; a change of its rules raises it, and older rows are stale


class Needed(NamedTuple):
    """Measured ÷ modelled memory of a step, and of the stages of its pipelines; 1 where nothing is known."""

    whole: float = 1.0
    stages: float = 1.0


def is_allowed() -> bool:
    """Whether the user's own database may be read and written."""
    return os.environ.get(SETTING, "").strip().lower() != "never"


def modelled_bytes(plan: PlanData) -> float:
    """Peak bytes of a new plan by the model alone."""
    return plan.memory.peak_bytes / plan.provenance.get("memory factor", 1.0)


def with_memory(plan: PlanData, num_bytes: int) -> PlanData:
    """The plan with what its program was found to allocate."""
    provenance = {**plan.provenance, "memory factor": num_bytes / modelled_bytes(plan)}
    return replace(plan, memory=replace(plan.memory, peak_bytes=num_bytes), provenance=provenance)


def with_stages_memory(plan: PlanData, num_bytes: Iterable[int]) -> PlanData:
    """The plan of a pipeline with what the programs of each stage were found to allocate."""
    stages = tuple(replace(stage, peak_bytes=n) for stage, n in zip(plan.stages, num_bytes, strict=True))
    return replace(with_memory(plan, max(stage.peak_bytes for stage in stages)), stages=stages)


def keep_memory(database: Database, plan: PlanData, traced: Traced, num_bytes: int, modelled: float) -> None:
    """Keeps what the program of one device's share of a step, or of a stage, allocates.

    Args:
        database: Where it is kept.
        plan: The plan.
        traced: Its program, changed as the plan says.
        num_bytes: What is allocated.
        modelled: What the model says of it.
    """
    if plan.mesh.chip is None:
        return
    split = _stages_split(plan) if plan.stages else step_of(plan, traced.graph).shardings
    told = {
        "model": _MODEL,
        "program": program_of(traced.graph),
        "split": split,
        "is_staged": bool(plan.stages),
        "modelled": modelled,
    }
    place = f"{MEMORY}{_family(traced)}", json.dumps(told, sort_keys=True), plan.mesh.chip.name
    database.keep([measured_now(Key(*place, "", "", this_compiler()), "rehearsed", None, num_bytes)])


def _stages_split(plan: PlanData) -> str:
    """How a pipeline is cut and its stages are split, as a digest."""
    stages = [(stage.layers, stage.chunks, stage.mesh.sizes, stage.method) for stage in plan.stages]
    return hashlib.sha256(repr((plan.pipeline, stages)).encode()).hexdigest()[:16]


def _family(traced: Traced) -> str:
    """The fingerprint of a step as it was written, whatever changed it."""
    return program_of(traced.written or traced.graph)


def known_memory(traced: Traced, chip: Chip | None) -> Needed:
    """The largest measured ÷ modelled memory of a program on a chip, of its own rows if there are any.

    Nothing is known where ``MESHWRIGHT_MEASURE=never``.
    """
    rows = _rows(traced, chip)
    own = program_of(traced.graph) if rows else ""
    mine = [row for row in rows if row["program"] == own and not row["is_staged"]]
    whole = mine or [row for row in rows if not row["is_staged"]]
    stages = [row for row in rows if row["is_staged"]]
    return Needed(*(max((row["ratio"] for row in some), default=1.0) for some in (whole, stages)))


def memory_digest(traced: Traced, chip: Chip | None) -> str:
    """A digest of all that is known of a step's memory, whatever changes it; empty where nothing is."""
    rows = sorted(json.dumps(row, sort_keys=True) for row in _rows(traced, chip))
    return hashlib.sha256("".join(rows).encode()).hexdigest() if rows else ""


def _rows(traced: Traced, chip: Chip | None) -> list[dict[str, Any]]:
    """What is known of a step, and of it with other recomputation and microbatches, with the ratio of each row."""
    if chip is None or not is_allowed() or not (cache_folder() / FILE_NAME).exists():
        return []
    with open_database() as database:
        rows = [row for row in database.rows(chip=chip.name, compiler=this_compiler()) if row.memory_bytes]
    rows = [row for row in rows if row.key.fingerprint.startswith(MEMORY)]
    name, found = f"{MEMORY}{_family(traced)}" if rows else "", []
    for row in rows:
        told = json.loads(row.key.shardings)
        if row.key.fingerprint == name and told.get("model") == _MODEL:
            found.append({**told, "ratio": (row.memory_bytes or 0) / told["modelled"]})
    return found
