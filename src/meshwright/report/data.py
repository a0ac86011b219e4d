"""The page's content as plain data: a plan with identical layers and repeated communication collapsed."""

import time
from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from meshwright.explain.show.decisions import decisions, words
from meshwright.explain.show.plan_text import memory_text, step_text
from meshwright.explain.show.tensor_table import TensorRow, plan_rows, which
from meshwright.parallelism.sentence import plain_sentence
from meshwright.parallelism.subject.subject import Subjects
from meshwright.parallelism.words import bytes_on_device, label_words
from meshwright.plans.text import axes_text, cost_text, gap_text, mesh_text, status_text
from meshwright.report.about import about_data, speed_data
from meshwright.report.alternatives import add_alternatives
from meshwright.report.programs import blocks_data, programs_data
from meshwright.report.timeline import recorded_data, timeline_data
from meshwright.simulator.simulate import simulate

if TYPE_CHECKING:
    from meshwright.plans.plan import Compared, PlanData
    from meshwright.runtime.stages.recording import Event
    from meshwright.simulator.simulation import Simulation

_PATHS = 4  # shown of each row


def page_data(plan: "PlanData", seconds: float, recorded: Sequence["Event"] = ()) -> dict[str, Any]:
    """Everything the page shows of one plan.

    Args:
        plan: The plan.
        seconds: Time for all of it; the time that remains goes to solving for alternatives, which are bounded first.
            With 0 there are no alternatives.
        recorded: What happened in a real step of a plan in stages.
    """
    deadline = time.perf_counter() + seconds
    results = [t for t in plan.results if t.role != "state"]
    rows, subjects = plan_rows(plan, [*plan.arguments, *results]), Subjects(plan)
    mesh, bytes_of = plan.stages[0].mesh if plan.stages else plan.mesh, _held(plan, subjects)
    simulated: Simulation | None = None if plan.mesh.is_abstract else simulate(plan)
    page: dict[str, Any] = {
        "about": about_data(plan),
        "speed": speed_data(plan, simulated),
        "timeline": None if simulated is None or simulated.step_s <= 0 else timeline_data(simulated),
        "recorded": recorded_data(recorded, simulated) if recorded and simulated is not None else None,
        "method": plan.method,
        "mesh": _mesh(plan),
        "links": [mesh.link_of(a) for a in range(len(mesh.sizes))],
        "sentence": plain_sentence(plan),
        "verdict": [{"name": p.name, "axes": p.axes, "text": p.text} for p in plan.verdict.parts],
        "abstract": plan.mesh.is_abstract,
        "cost": {"total": plan.cost.total, "compute": plan.cost.compute, "communication": plan.cost.communication},
        "step": step_text(plan),
        "memory": {
            "text": memory_text(plan),
            "peak": plan.memory.peak_bytes,
            "limit": plan.memory.limit_bytes,
            "at": label_words(plan.memory.peak_operation),
            "arguments": dict(plan.memory.argument_bytes),
        },
        "solution": {
            "status": status_text(plan),
            "bound": plan.solution.lower_bound,
            "gap": plan.solution.gap if isfinite(plan.solution.gap) else None,
            "text": gap_text(plan),
        },
        "considered": [
            {"mesh": "×".join(map(str, v.shape)), "cost": v.cost, "peak": v.peak_bytes, "remark": v.remark}
            for v in plan.considered
        ],
        "decided": [
            {
                "name": one.name,
                "taken": one.taken,
                "without": one.without,
                "instead": one.instead and _compared(plan, one.instead),
            }
            for one in decisions(plan).decisions
        ],
        "compared": [_compared(plan, one) for one in plan.compared],
        "unsplittable": plan.unsplittable,
        "remarks": plan.remarks,
        "provenance": dict(plan.provenance),
        "tensors": [_row(row) | {"held": bytes_of(row)} for row in rows],
        "collectives": _collectives(subjects),
        "stages": [],
        "blocks": blocks_data(plan),
        "programs": programs_data(plan, subjects),
    }
    if plan.stages and simulated is not None:  # stages are parts of a real cluster
        from meshwright.report.stages import stage_data

        page |= stage_data(plan, simulated)
    if subjects and seconds > 0:
        add_alternatives(subjects, rows, page["tensors"], deadline)
    return page


def _compared(plan: "PlanData", other: "Compared") -> dict[str, Any]:
    """A plan that was not taken: in words, its step where it fits, and its memory."""
    more = None if other.step_s is None or not plan.step_s else other.step_s / plan.step_s - 1
    return {"plan": words(other), "step": other.step_s, "more": more, "peak": other.peak_bytes}


def _mesh(plan: "PlanData") -> dict[str, Any]:
    """The axes; of a pipelined plan those of its stages, where all have the same."""
    meshes = {stage.mesh.sizes: stage.mesh for stage in plan.stages} or {plan.mesh.sizes: plan.mesh}
    axes = next(iter(meshes.values())) if len(meshes) == 1 else None
    names, sizes = ((), ()) if axes is None else (axes.names, axes.sizes)
    return {"names": names, "sizes": sizes, "axes": axes_text(plan), "text": mesh_text(plan)}


def _held(plan: "PlanData", subjects: Subjects) -> Callable[[TensorRow], list[int]]:
    """The bytes of all tensors of a row together on a device; of a pipelined plan, on one device of each stage."""
    tensors_of = [{t.path: t for t in stage.tensors} for stage in plan.stages]
    paths = set().union(*tensors_of)
    tensors = {t.path: t for t in (*plan.arguments, *plan.results)}

    def held(row: TensorRow) -> list[int]:
        if not plan.stages:
            return [row.bytes_on_device * len(row.paths)]
        bytes_of_stage = [0] * len(plan.stages)
        for path in row.paths:
            for number, there in enumerate(tensors_of):
                if path in there:
                    t, shape = there[path], plan.stages[number].mesh.shape
                    bytes_of_stage[number] += bytes_on_device(t.shape, t.dtype, t.spec, shape)
            if path not in paths:  # data are on the stage that reads them, results on the stage that computes them
                bytes_of_stage[(subjects.of(tensors[path]).number or 0) if subjects else 0] += row.bytes_on_device
        return bytes_of_stage

    return held


def _row(row: TensorRow) -> dict[str, Any]:
    return {
        "path": row.path,
        "count": len(row.paths),
        "which": row.which,
        "paths": row.paths[:_PATHS],
        "shape": row.shape,
        "dtype": row.dtype,
        "spec": row.spec,
        "role": row.role,
        "symbols": row.symbols,
        "words": row.words,
        "kind": row.kind,
        "bytes": row.bytes_on_device,
        "mesh": dict(row.mesh),
    }


def _collectives(subjects: Subjects) -> list[dict[str, Any]]:
    """Collectives that differ in nothing but the layer they belong to, as one row each; the longest first."""
    rows: dict[tuple, list[float]] = {}
    for subject in subjects:
        for c in subject.collectives:
            about = (c.kind, "+".join(c.axes), c.phase, c.purpose, label_words(c.operation), c.source)
            row = rows.setdefault((subject.number, *about), [0.0, 0.0, 0.0])
            row[0] += c.trips
            row[1] += c.bytes * c.trips
            row[2] += c.seconds
    names = ("stage", "kind", "axes", "phase", "purpose", "operation", "source")
    rows_of_page = [
        dict(zip(names, key, strict=True)) | {"number": n, "bytes": size, "seconds": s}
        for key, (n, size, s) in rows.items()
    ]
    return sorted(rows_of_page, key=lambda row: -row["seconds"])


def difference_data(one: "PlanData", other: "PlanData") -> dict[str, Any]:
    """The page's data on the difference between two plans."""
    from meshwright.explain.show.diff import diff

    difference = diff(one, other)
    return {
        "same": difference.is_same,
        "problems": difference.problems,
        "moved": [
            {
                "path": m.path,
                "count": len(m.paths),
                "which": which(m.paths),
                "one": _row(m.one) if m.one else None,
                "other": _row(m.other) if m.other else None,
            }
            for m in difference.moved
        ],
        "sent": [
            {"kind": s.kind, "axes": "+".join(s.axes), "phase": s.phase, "bytes": s.bytes, "seconds": s.seconds}
            for s in difference.sent
        ],
        "step": [cost_text(one, one.step_s), cost_text(other, other.step_s)],
    }
