"""What whole steps were found to need of memory, kept so that the next plan of the same program counts with it.

A rehearsal and a profile compile one device's share of a step, and XLA says what it allocates. Measured ÷ modelled
bytes is a property of the program more than of its split: XLA stores the same values under another. So every plan of
the program is corrected by the largest ratio that is known of it, and solved under a limit to match.
"""

import json
import os
from dataclasses import replace

from meshwright.graph import Graph
from meshwright.hardware import Chip
from meshwright.plans.plan import PlanData
from meshwright.profiler.database import cache_folder
from meshwright.profiler.local import SETTING
from meshwright.profiler.measurements import Database, Key, measured_now, open_database, this_compiler
from meshwright.profiler.measurements.database import FILE_NAME
from meshwright.rehearsal.calibration import figures_digest
from meshwright.rehearsal.parts import program_of, step_of

MEMORY = "memory "  # begins the fingerprint of a row that says what a whole step needed


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


def keep_memory(database: Database, plan: PlanData, graph: Graph, num_bytes: int) -> None:
    """Keeps what a program of one device's share of a step allocates."""
    chip, step = plan.mesh.chip, step_of(plan, graph)
    if chip is not None:
        told = {"figures": figures_digest(chip), "modelled": modelled_bytes(plan), "split": step.shardings}
        place = f"{MEMORY}{step.fingerprint}", json.dumps(told, sort_keys=True), chip.name
        key = Key(*place, "", step.dtype, this_compiler())
        database.keep([measured_now(key, "rehearsed", None, num_bytes)])


def known_memory(graph: Graph, chip: Chip | None) -> float:
    """The largest measured ÷ modelled memory of a program on a chip; 1 where none is known.

    Nothing is known where ``MESHWRIGHT_MEASURE=never``.
    """
    if chip is None or not is_allowed() or not (cache_folder() / FILE_NAME).exists():
        return 1.0
    with open_database() as database:
        rows = [row for row in database.rows(chip=chip.name, compiler=this_compiler()) if row.memory_bytes]
    rows = [row for row in rows if row.key.fingerprint.startswith(MEMORY)]
    name = f"{MEMORY}{program_of(graph)}" if rows else ""
    found = []
    for row in rows:
        if row.key.fingerprint == name:
            told = json.loads(row.key.shardings)
            if told["figures"] == figures_digest(chip):
                found.append((row.memory_bytes or 0) / told["modelled"])
    return max(found, default=1.0)
