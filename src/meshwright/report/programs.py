"""The programs that the page shows: the plan's own, or one for all stages with the same split."""

from typing import TYPE_CHECKING, Any

from meshwright.parallelism.subject.memory_timeline import memory_over_time
from meshwright.parallelism.subject.subject import Subjects
from meshwright.plans.records.record import MEMORY_ROLES, Record
from meshwright.plans.text import stages_text
from meshwright.report.layers import layer_data

if TYPE_CHECKING:
    from meshwright.plans.plan import PlanData

_MOMENTS = 480  # of memory over time


def programs_data(plan: "PlanData", subjects: Subjects) -> list[dict[str, Any]]:
    """Layers and operations of each program, memory over time of a plan without stages."""
    if not plan.stages:
        return [{"name": "", **layer_data(plan.mesh, s.facts), "timeline": _timeline(s.record)} for s in subjects]
    data_of: dict[int, dict[str, Any]] = {}
    stages: dict[int, list[int]] = {}
    for number in range(len(subjects)):
        view = plan.staged_record.view[number]
        stages.setdefault(view, []).append(number)
        if view not in data_of:
            data_of[view] = layer_data(plan.stages[number].mesh, subjects.whole(number), late="x")
    return [{"name": stages_text(stages[view]), **data} for view, data in data_of.items()]


def _timeline(record: Record) -> dict[str, Any]:
    whole = memory_over_time(record.problem)
    thin = whole.thinned(_MOMENTS)
    used = [i for i in range(len(MEMORY_ROLES)) if thin.by_role[i].any()]
    phases = record.program.phases
    return {
        "num_ops": len(whole.at),
        "at": thin.at.tolist(),
        "roles": {MEMORY_ROLES[i]: thin.by_role[i].round().astype(int).tolist() for i in used},
        "phase": [phases[record.program.phase[op]] for op in thin.at.tolist()],
    }
