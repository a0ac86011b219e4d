"""How figures of plans are written wherever they are shown."""

from meshwright.planner.plan import Plan
from meshwright.units import format_seconds


def cost_text(plan: Plan, value: float) -> str:
    """A cost with its unit; abstract meshes have none."""
    return f"{value:,.6g}" if plan.mesh.is_abstract else format_seconds(value)


def mesh_text(plan: Plan) -> str:
    """The mesh and what is behind it."""
    mesh = " × ".join(f"{name}={size}" for name, size in plan.mesh.shape.items())
    return f"{mesh} ({'abstract' if plan.mesh.cluster is None else plan.mesh.cluster})"
