"""Shows a plan to people: what is split how, what is sent, and what it costs."""

import io
import re
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.planner.plan import Collective, Plan
from meshwright.planner.show_stages import pipeline_text, stages_view
from meshwright.planner.storage import spec_text
from meshwright.planner.tensor import Tensor
from meshwright.units import format_bytes, format_seconds

_NUMBER = re.compile(r"(?<![A-Za-z])\d+(?![A-Za-z])|(?<=[_.])\d+")
_WIDTH = 118


def plan_text(plan: Plan) -> str:
    """The plan as plain text."""
    buffer = io.StringIO()
    Console(file=buffer, width=_WIDTH, no_color=True).print(plan_view(plan))
    return buffer.getvalue().rstrip()


def plan_view(plan: Plan) -> RenderableType:
    """The plan for a rich console."""
    parts: list[RenderableType] = [_headline(plan)]
    if plan.stages:
        parts.append(stages_view(plan))
    parts.append(_tensors("arguments, on their stages" if plan.stages else "arguments", plan.arguments))
    results = [t for t in plan.results if t.role != "state"]
    if results:
        parts.append(_tensors("results", results))
    if plan.stages:
        return Group(*parts)
    parts.append(_collectives(plan))
    if len(plan.considered) > 1:
        parts.append(_considered(plan))
    if plan.unsplittable:
        parts.append(Text(f"planned without a rule, so not split: {', '.join(plan.unsplittable)}"))
    if plan.mesh.num_devices > 1 and not any(axes for t in plan.arguments for axes in t.spec):
        parts.append(Text(_nothing_split(plan)))
    return Group(*parts)


def _nothing_split(plan: Plan) -> str:
    sizes = [n for n in plan.mesh.sizes if n > 1]
    if any(size % n == 0 for t in plan.arguments for size in t.shape if size for n in sizes):
        return "no argument is split: sending its parts about would cost more than the split saves."
    return (
        f"no argument can be split: none has a dim that is a multiple of {' or '.join(map(str, sizes))}, so every "
        "device does the same work. Pad the batch or a hidden dim, or use another number of devices."
    )


def cost_text(plan: Plan, value: float) -> str:
    """A cost with its unit; abstract meshes have none."""
    return f"{value:,.6g}" if plan.mesh.is_abstract else format_seconds(value)


def _headline(plan: Plan) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    mesh = " × ".join(f"{name}={size}" for name, size in plan.mesh.shape.items())
    where = "abstract" if plan.mesh.cluster is None else str(plan.mesh.cluster)
    table.add_row("plan", f"{plan.method} on mesh {mesh} ({where})" if not plan.stages else f"{plan.method} on {where}")
    if plan.pipeline is not None:
        table.add_row("pipeline", pipeline_text(plan))
    cost = plan.cost
    table.add_row(
        "step",
        f"{cost_text(plan, cost.total)} = {cost_text(plan, cost.compute)} compute + "
        f"{cost_text(plan, cost.communication)} communication",
    )
    memory = plan.memory
    limit = "" if memory.limit_bytes is None else f" of {format_bytes(memory.limit_bytes)} allowed"
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.argument_bytes.items() if size)
    table.add_row("memory", f"{format_bytes(memory.peak_bytes)}{limit} per device ({held})")
    solution = plan.solution
    table.add_row(
        "solution",
        f"{solution.status}, at most {100 * solution.gap:.2f}% above the lower bound "
        + cost_text(plan, solution.lower_bound)
        + (f"; solved in {format_seconds(solution.seconds)}" if solution.seconds else ""),
    )
    return table


def _tensors(title: str, tensors: Iterable[Tensor]) -> Table:
    table = Table(title=f"{title}: dims by axes", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, justify in (("path", "left"), ("shape", "left"), ("dtype", "left"), ("sharding", "left")):
        table.add_column(name, justify=justify, no_wrap=name != "path")  # type: ignore[arg-type]
    for path, tensor, count in fold_paths(tensors):
        shape = "×".join(map(str, tensor.shape)) or "scalar"
        times = f"  ({count}×)" if count > 1 else ""
        table.add_row(path + times, shape, tensor.dtype, spec_text(tensor.spec))
    return table


def fold_paths(tensors: Iterable[Tensor]) -> list[tuple[str, Tensor, int]]:
    """Tensors whose paths differ only in numbers and that are split alike, as one row each."""
    rows: dict[tuple, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.role != "static":
            key = (_NUMBER.sub("*", tensor.path), tensor.shape, tensor.dtype, tensor.spec)
            rows.setdefault(key, []).append(tensor)
    return [(key[0] if len(found) > 1 else found[0].path, found[0], len(found)) for key, found in rows.items()]


def _collectives(plan: Plan) -> RenderableType:
    if not plan.collectives:
        return Text("communication: none")
    table = Table(title="communication", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("kind", "axes", "phase", "for"):
        table.add_column(name)
    for name in ("number", "bytes", "time", "share"):
        table.add_column(name, justify="right")
    rows: dict[tuple[str, tuple[str, ...], str, str], list[Collective]] = {}
    for item in plan.collectives:
        rows.setdefault((item.kind, item.axes, item.phase, item.purpose), []).append(item)
    ordered = sorted(rows.items(), key=lambda row: -sum(c.seconds for c in row[1]))
    for (kind, axes, phase, purpose), items in ordered:
        seconds = sum(c.seconds for c in items)
        share = seconds / plan.cost.total if plan.cost.total else 0.0
        table.add_row(
            kind,
            "+".join(axes),
            phase,
            purpose,
            f"{sum(c.trips for c in items):,.0f}",
            format_bytes(sum(c.bytes * c.trips for c in items)),
            cost_text(plan, seconds),
            f"{100 * share:.1f}%",
        )
    return table


def _considered(plan: Plan) -> Table:
    table = Table(title="mesh views solved", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("mesh")
    table.add_column("step", justify="right")
    table.add_column("memory", justify="right")
    table.add_column("remark", overflow="fold")
    for view in plan.considered:
        cost = "" if view.cost is None else cost_text(plan, view.cost)
        size = "" if view.peak_bytes is None else format_bytes(view.peak_bytes)
        chosen = "chosen" if view.shape == plan.mesh.sizes else view.remark
        table.add_row("×".join(map(str, view.shape)), cost, size, chosen)
    return table
