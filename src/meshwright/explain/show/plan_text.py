"""A plan on one screen: its verdict, its costs, its shardings and its communication."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Table, plain_table, plain_text
from meshwright.explain.show.tensor_table import TensorRow, plan_rows
from meshwright.parallelism.sentence import plain_sentence
from meshwright.plans.stage_text import pipeline_text, stages_view
from meshwright.plans.text import cost_text, gap_text, mesh_text, status_text
from meshwright.plans.trust import trust_of
from meshwright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from meshwright.plans.plan import Collective, PlanData

_MOST_TENSORS, _MOST_RESULTS, _MOST_SENT, _MOST_VIEWS = 14, 4, 8, 6


def plan_text(plan: "PlanData") -> str:
    """The plan as plain text."""
    return plain_text(plan_view(plan))


def plan_view(plan: "PlanData") -> RenderableType:
    """The plan for a rich console."""
    if plan.stages:
        return Group(_headline(plan), stages_view(plan), *_tensors(plan), *map(Text, plan.remarks))
    parts: list[RenderableType] = [_headline(plan), *_tensors(plan), *_collectives(plan)]
    if len(plan.considered) > 1:
        parts += _considered(plan)
    if plan.unsplittable:
        parts.append(Text(f"planned without a rule, so not split: {', '.join(plan.unsplittable)}"))
    if plan.mesh.num_devices > 1 and not any(axes for t in plan.arguments for axes in t.spec):
        parts.append(Text(_nothing_split(plan)))
    trust = trust_of(plan)
    return Group(*parts, *map(Text, (*plan.remarks, *(() if trust is None else trust.remarks))))


def _nothing_split(plan: "PlanData") -> str:
    sizes = [n for n in plan.mesh.sizes if n > 1]
    if any(size % n == 0 for t in plan.arguments for size in t.shape if size for n in sizes):
        return "no argument is split: communication would cost more than a split saves."
    return (
        f"no argument can be split: none has a dim that is a multiple of {' or '.join(map(str, sizes))}, so every "
        "device does the same work. Pad the batch or a hidden dim, or use another number of devices."
    )


def _headline(plan: "PlanData") -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("plan", f"{plan.method} on {plan.mesh.cluster if plan.stages else f'mesh {mesh_text(plan)}'}")
    sentence, details = plain_sentence(plan), str(plan.verdict)
    table.add_row("verdict", Text(sentence, style="bold"))
    if details.lower() != sentence.lower():
        table.add_row("", details)
    if plan.pipeline is not None:
        table.add_row("pipeline", pipeline_text(plan))
    table.add_row("step", step_text(plan))
    table.add_row("memory", memory_text(plan))
    if plan.compiler_options and plan.mesh.num_devices > 1:
        table.add_row("compiler", ", ".join(f"{name}={value}" for name, value in plan.compiler_options.items()))
    solution = plan.solution
    table.add_row(
        "solution",
        f"{status_text(plan)}, {gap_text(plan)}"
        + (f"; solved in {format_seconds(solution.seconds)}" if solution.seconds else ""),
    )
    return table


def step_text(plan: "PlanData") -> str:
    """The step's time, the interval in which measured ones are expected, and its parts."""
    cost, trust = plan.cost, trust_of(plan)
    interval = "" if trust is None else f", {trust.interval}"
    if cost.step:
        step, waiting, busy, sent = (
            format_seconds(v) for v in (cost.step, cost.waiting, cost.step - cost.waiting, cost.communication)
        )
        if len(plan.stages) <= 1 and not plan.collectives:
            return f"{step}{interval}, all of it compute"
        what = "waiting for other stages and communication" if len(plan.stages) > 1 else "waiting for communication"
        return f"{step}{interval} = {busy} compute + {waiting} {what}, which alone would take {sent}"
    total, compute, sent = (cost_text(plan, v) for v in (plan.cost.total, plan.cost.compute, plan.cost.communication))
    return f"{total}{interval} = {compute} compute + {sent} communication"


def memory_text(plan: "PlanData") -> str:
    """Peak memory, the limit, and the bytes of the arguments."""
    memory = plan.memory
    limit = "" if memory.limit_bytes is None else f" of {format_bytes(memory.limit_bytes)} allowed"
    of_arguments = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.argument_bytes.items() if size)
    on_host = f", and {format_bytes(memory.host_bytes)} on its host" if memory.host_bytes else ""
    return f"{format_bytes(memory.peak_bytes)}{limit} per device{on_host}" + (
        f" ({of_arguments})" if of_arguments else ""
    )


def _tensors(plan: "PlanData") -> list[RenderableType]:
    """Parameters and data, the largest first; optimizer state in a line, since it is mostly split as they are."""
    rows = plan_rows(plan, plan.arguments)
    shown = [row for row in rows if row.role != "optimizer"]
    largest = sorted(shown, key=lambda row: -row.bytes_on_device * len(row.paths))[:_MOST_TENSORS]
    kept = [row for row in shown if row in largest]
    results = [t for t in plan.results if t.role == "result" and t.shape]
    result_rows = plan_rows(plan, results)[:_MOST_RESULTS]
    notes = [] if len(kept) == len(shown) else [f"{len(shown) - len(kept)} more rows: plan.show() has all of them."]
    tables = [_table("arguments", kept), *([_table("results", result_rows)] if result_rows else [])]
    return [*tables, *(Text(note) for note in [*notes, *_optimizer(rows)])]


def _table(title: str, rows: Sequence[TensorRow]) -> Table:
    table = plain_table(title, ("path", "shape", "sharding", "kind"), ("on a device",))
    for row in rows:
        shape = "×".join(map(str, row.shape)) or "scalar"
        table.add_row(row.name, shape, row.symbols, row.kind, format_bytes(row.bytes_on_device))
    return table


def _optimizer(rows: Sequence[TensorRow]) -> list[str]:
    state = [row for row in rows if row.role == "optimizer" and row.shape]
    if not state:
        return []
    specs = {(row.shape, row.spec) for row in rows if row.role == "parameters"}
    elsewhere = [row for row in state if (row.shape, row.spec) not in specs]
    where = "is split as its parameters are" if not elsewhere else "is not split as its parameters are"
    worst = max(elsewhere, key=lambda row: row.bytes_on_device * len(row.paths), default=None)
    example = f": {worst.path} is {worst.symbols}, {worst.kind}" if worst else ""
    return [f"optimizer state {where}{example}"]


def _collectives(plan: "PlanData") -> list[RenderableType]:
    if not plan.collectives:
        return [Text("communication: none")]
    table = plain_table("communication", ("kind", "axes", "phase", "for"), ("number", "bytes", "time", "share"))
    sums = sums_of(plan.collectives)
    for (kind, axes, phase, purpose), (number, size, seconds) in sums[:_MOST_SENT]:
        share = seconds / plan.cost.total if plan.cost.total else 0.0
        sent = (f"{number:,.0f}", format_bytes(size), cost_text(plan, seconds), f"{100 * share:.1f}%")
        table.add_row(kind, "+".join(axes), phase, purpose, *sent)
    if len(sums) > _MOST_SENT:
        rest = sum(seconds for _, (_, _, seconds) in sums[_MOST_SENT:])
        return [table, Text(f"{len(sums) - _MOST_SENT} more kinds, {cost_text(plan, rest)} together.")]
    return [table]


def sums_of(
    collectives: Sequence["Collective"],
) -> list[tuple[tuple[str, tuple[str, ...], str, str], tuple[float, float, float]]]:
    """Number, bytes and time of collectives by kind, axes, phase and purpose; the longest first."""
    sums: dict[tuple[str, tuple[str, ...], str, str], tuple[float, float, float]] = {}
    for item in collectives:
        key = (item.kind, item.axes, item.phase, item.purpose)
        number, size, seconds = sums.get(key, (0.0, 0.0, 0.0))
        sums[key] = (number + item.trips, size + item.bytes * item.trips, seconds + item.seconds)
    return sorted(sums.items(), key=lambda row: -row[1][2])


def _considered(plan: "PlanData") -> list[RenderableType]:
    table = plain_table("mesh views solved", ("mesh",), ("costs", "memory"))
    table.add_column("remark", overflow="fold")
    ranked = sorted(plan.considered, key=lambda v: (v.shape != plan.mesh.sizes, v.cost is None, v.cost or 0.0))
    for view in ranked[:_MOST_VIEWS]:
        cost = "" if view.cost is None else cost_text(plan, view.cost)
        size = "" if view.peak_bytes is None else format_bytes(view.peak_bytes)
        chosen = "chosen" if view.shape == plan.mesh.sizes else view.remark
        table.add_row("×".join(map(str, view.shape)), cost, size, chosen)
    left = len(ranked) - _MOST_VIEWS
    return [table, *([Text(f"{left} more views, none better.")] if left > 0 else [])]
