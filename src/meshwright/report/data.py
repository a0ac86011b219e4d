"""What the page shows, as plain data: a plan boiled down, identical layers and repeated communication collapsed."""

import time
from typing import TYPE_CHECKING, Any

from meshwright.explain.explanation import Explanation
from meshwright.explain.record import MEMORY_ROLES
from meshwright.explain.story import memory_text, step_text
from meshwright.explain.tensors import Row, plan_rows
from meshwright.explain.timeline import memory_over_time
from meshwright.explain.why import Explainer
from meshwright.explain.words import label_words
from meshwright.planner.show import cost_text, mesh_text

if TYPE_CHECKING:
    from meshwright.planner.plan import Plan

_MOMENTS = 480  # of memory over time
_CHANGES = 3
_PATHS = 4  # shown of each row


def page_data(plan: "Plan", seconds: float) -> dict[str, Any]:
    """Everything the page shows of one plan.

    Args:
        plan: The plan.
        seconds: Time to price alternatives; tensors that it does not suffice for come without.
    """
    results = [t for t in plan.results if t.role != "state"]
    rows = plan_rows(plan, [*plan.arguments, *results])
    found: dict[str, Any] = {
        "method": plan.method,
        "mesh": {"names": plan.mesh.names, "sizes": plan.mesh.sizes, "text": mesh_text(plan)},
        "links": [plan.mesh.link_of(a) for a in range(len(plan.mesh.sizes))],
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
            "status": plan.solution.status,
            "bound": plan.solution.lower_bound,
            "gap": plan.solution.gap,
        },
        "considered": [
            {"mesh": "×".join(map(str, v.shape)), "cost": v.cost, "peak": v.peak_bytes, "remark": v.remark}
            for v in plan.considered
        ],
        "unsplittable": plan.unsplittable,
        "provenance": dict(plan.provenance),
        "tensors": [_row(row) for row in rows],
        "collectives": _collectives(plan),
        "stages": [],
    }
    if plan.stages:
        from meshwright.report.stages import stage_data

        found |= stage_data(plan)
    if plan.record is not None:
        from meshwright.explain.judging import facts_of
        from meshwright.report.layers import layer_data

        facts = facts_of(plan, plan.record.program)
        found |= layer_data(plan, facts) | {"timeline": _timeline(plan)}
        if seconds > 0:
            _add_alternatives(Explainer(plan, facts), rows, found["tensors"], seconds)
    return found


def _row(row: Row) -> dict[str, Any]:
    return {
        "path": row.path,
        "count": len(row.paths),
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


def _collectives(plan: "Plan") -> list[dict[str, Any]]:
    """Collectives that differ in nothing but the layer they belong to, as one row each; the longest first."""
    rows: dict[tuple, list[float]] = {}
    for c in plan.collectives:
        key = (c.kind, "+".join(c.axes), c.phase, c.purpose, label_words(c.operation), c.source)
        row = rows.setdefault(key, [0.0, 0.0, 0.0])
        row[0] += c.trips
        row[1] += c.bytes * c.trips
        row[2] += c.seconds
    names = ("kind", "axes", "phase", "purpose", "operation", "source")
    found = [
        dict(zip(names, key, strict=True)) | {"number": n, "bytes": size, "seconds": s}
        for key, (n, size, s) in rows.items()
    ]
    return sorted(found, key=lambda row: -row["seconds"])


def _timeline(plan: "Plan") -> dict[str, Any]:
    whole = memory_over_time(plan.record.problem)
    thin = whole.thinned(_MOMENTS)
    used = [i for i in range(len(MEMORY_ROLES)) if thin.by_role[i].any()]
    phases = plan.record.program.phases
    return {
        "num_ops": len(whole.at),
        "at": thin.at.tolist(),
        "roles": {MEMORY_ROLES[i]: thin.by_role[i].round().astype(int).tolist() for i in used},
        "phase": [phases[plan.record.program.phase[op]] for op in thin.at.tolist()],
    }


def _add_alternatives(explainer: Explainer, rows: list[Row], shown: list[dict[str, Any]], seconds: float) -> None:
    """Prices what else was possible, the largest tensors first, while there is time."""
    tensors = {t.path: t for t in explainer.plan.arguments}
    wanted = [i for i, row in enumerate(rows) if row.role in ("parameters", "data") and row.shape]
    wanted.sort(key=lambda i: (rows[i].role != "parameters", -rows[i].bytes_on_device * len(rows[i].paths)))
    deadline = time.perf_counter() + seconds
    for done, i in enumerate(wanted):
        if done == 1:  # the first has loaded the solver, which does not count
            deadline = time.perf_counter() + seconds
        left = max(0.0, deadline - time.perf_counter())
        if not left and done:
            return
        shown[i] |= _explanation(explainer.explain(tensors[rows[i].paths[0]], left / (len(wanted) - done)))


def _explanation(found: Explanation) -> dict[str, Any]:
    alternatives = [
        {
            "symbols": a.symbols,
            "words": a.words,
            "difference": a.difference if a.at_least < float("inf") else None,
            "sure": "exact" if a.is_exact else "at least" if a.cost == float("inf") else "at most",
            "allowed": a.allowed,
            "fits": a.fits,
            "peak": a.peak_bytes,
            "changes": [[c.what, c.where, c.seconds] for c in a.changes[:_CHANGES]],
        }
        for a in found.alternatives
    ]
    return {"reason": found.reason, "alternatives": alternatives, "left": found.num_left}


def difference_data(one: "Plan", other: "Plan") -> dict[str, Any]:
    """What the page shows of the difference between two plans."""
    from meshwright.explain.diff import diff

    found = diff(one, other)
    return {
        "same": found.is_same,
        "moved": [
            {
                "path": m.path,
                "count": len(m.paths),
                "one": _row(m.one) if m.one else None,
                "other": _row(m.other) if m.other else None,
            }
            for m in found.moved
        ],
        "sent": [
            {"kind": s.kind, "axes": "+".join(s.axes), "phase": s.phase, "bytes": s.bytes, "seconds": s.seconds}
            for s in found.sent
        ],
        "step": [cost_text(one, one.cost.total), cost_text(other, other.cost.total)],
    }
