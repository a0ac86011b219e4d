"""The programs that the page shows: the plan's own, or one for all stages with the same split."""

from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.parallelism.subject.memory_timeline import memory_over_time
from meshwright.parallelism.subject.subject import Subjects
from meshwright.plans.records.record import MEMORY_ROLES, Record
from meshwright.plans.text import stages_text
from meshwright.report.layers import layer_data

if TYPE_CHECKING:
    from meshwright.plans.plan import PlanData

_MOMENTS, _FEWEST = 480, 12  # of memory over time, and of one microbatch


def programs_data(plan: "PlanData", subjects: Subjects) -> list[dict[str, Any]]:
    """Layers and operations of each program, memory over time of a plan without stages."""
    if not plan.stages:
        return [
            {"name": "", **layer_data(plan.mesh, s.facts), "timeline": _timeline(s.record, plan.microbatches)}
            for s in subjects
        ]
    data_of: dict[int, dict[str, Any]] = {}
    stages: dict[int, list[int]] = {}
    for number in range(len(subjects)):
        view = plan.staged_record.view[number]
        stages.setdefault(view, []).append(number)
        if view not in data_of:
            data_of[view] = layer_data(plan.stages[number].mesh, subjects.whole(number), late="x")
    return [{"name": stages_text(stages[view]), **data} for view, data in data_of.items()]


def _timeline(record: Record, num_parts: int) -> dict[str, Any]:
    """Memory over a step: what comes before the update is in the program once, and runs once for each microbatch."""
    whole, phases = memory_over_time(record.problem), record.program.phases
    thin = whole.thinned(max(_MOMENTS // num_parts, _FEWEST))
    used = [i for i in range(len(MEMORY_ROLES)) if thin.by_role[i].any()]
    before = np.flatnonzero(record.program.phase != phases.index("update"))
    length = int(before[-1]) + 1 if len(before) else 0  # of a microbatch, in operations
    part, rest = np.flatnonzero(thin.at < length), np.flatnonzero(thin.at >= length)
    order = np.concatenate([np.tile(part, num_parts), rest])
    number = np.concatenate([np.repeat(np.arange(num_parts), len(part)), np.full(len(rest), num_parts - 1)])
    op = thin.at[order]
    return {
        "num_ops": len(whole.at) + (num_parts - 1) * length,
        "num_parts": num_parts,
        "at": (op + number * length).tolist(),
        "op": op.tolist(),
        "part": number.tolist(),
        "roles": {MEMORY_ROLES[i]: thin.by_role[i, order].round().astype(int).tolist() for i in used},
        "phase": [phases[record.program.phase[one]] for one in op.tolist()],
    }
