"""The subject of a page in a few words: model, batch, machines, date; and the names that distinguish two plans."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from meshwright.plans.text import axes_text
from meshwright.simulator.spmd import batch_and_sequence

if TYPE_CHECKING:
    from meshwright.plans.plan import PlanData
    from meshwright.simulator.simulation import Simulation


def about_data(plan: "PlanData") -> dict[str, Any]:
    """The facts in the page's first line; unknown facts are None or empty."""
    batch, sequence = batch_and_sequence(plan)
    return {
        "model": str(plan.provenance.get("model", "")),
        "batch": batch or None,
        "sequence": sequence,
        "cluster": _machines(plan),
        "devices": plan.mesh.num_devices,
    }


def speed_data(plan: "PlanData", simulated: "Simulation | None") -> dict[str, Any] | None:
    """How fast a simulated step trains; None where nothing can be simulated."""
    if simulated is None or simulated.step_s <= 0:
        return None
    return {
        "step": simulated.step_s,
        "rate": simulated.tokens_per_s or None,
        "unit": simulated.work.counted,
        "mfu": simulated.mfu or None,
        "tflops": simulated.tflops_per_device,
        "bubble": simulated.bubble_fraction if plan.stages else None,
    }


def title(plan: "PlanData", other: "PlanData | None" = None) -> str:
    """A short title: the model and the machines."""
    name = str(plan.provenance.get("model", "")) or plan.method
    if other is not None:
        return f"{name}: {' and '.join(plan_names(plan, other))}"
    return f"{name} on {_machines(plan)}"


def today() -> str:
    """The day, such as ``2026-11-17``."""
    return datetime.now(tz=UTC).date().isoformat()


def plan_names(one: "PlanData", other: "PlanData") -> list[str]:
    """Short names of two plans: the first of their facts in which they differ, else their order."""
    for facts in zip(_facts(one), _facts(other), strict=True):
        if facts[0] != facts[1] and all(facts):
            return list(facts)
    return ["first plan", "second plan"]


def _facts(plan: "PlanData") -> tuple[str, ...]:
    batch, sequence = batch_and_sequence(plan)
    pipeline = plan.pipeline
    schedule = "" if pipeline is None else f"{pipeline.schedule}, {pipeline.num_microbatches} microbatches"
    return (
        str(plan.provenance.get("model", "")),
        plan.method,
        _machines(plan),
        axes_text(plan),
        schedule,
        f"batch {batch}" + ("" if sequence is None else f" × {sequence}"),
    )


def _machines(plan: "PlanData") -> str:
    cluster = plan.mesh.cluster
    return f"abstract mesh {'×'.join(map(str, plan.mesh.sizes))}" if cluster is None else cluster.name
