"""Where a plan puts the leaves of its arguments, whether it has stages or not."""

from typing import Any

from jax.sharding import NamedSharding

from meshwright.plans.plan import PlanData, partition_spec
from meshwright.runtime.spmd import device_mesh
from meshwright.runtime.stages.lowering.layout import leaf_shardings, stage_devices


def argument_shardings(plan: PlanData) -> list[Any]:
    """The sharding of each leaf of the arguments; None for leaves that are not arrays, and for a pipeline's data."""
    if plan.stages:
        return list(leaf_shardings(plan, stage_devices(plan)))
    mesh = device_mesh(plan)
    specs = (None if t.role == "static" else partition_spec(t.spec) for t in plan.arguments)
    return [None if spec is None else NamedSharding(mesh, spec) for spec in specs]
