"""The differences between two plans: verdict, costs, memory, shardings, communication."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Printed, plain_table
from meshwright.explain.show.plan_text import sums_of
from meshwright.explain.show.tensor_table import TensorRow, plan_rows, which
from meshwright.plans.text import cost_text, mesh_text
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from meshwright.plans.plan import Collective, PlanData
    from meshwright.plans.tensor import Tensor

_MOST_ROWS = 40


@dataclass(frozen=True, slots=True)
class Moved:
    """Tensors with different shardings in the two plans; None where a plan does not have them."""

    path: str
    paths: tuple[str, ...]
    one: TensorRow | None
    other: TensorRow | None


@dataclass(frozen=True, slots=True)
class SentDifference:
    """Communication of one kind, axes and phase: bytes and time in either plan."""

    kind: str
    axes: tuple[str, ...]
    phase: str
    bytes: tuple[float, float]
    seconds: tuple[float, float]


@dataclass(frozen=True)
class Difference(Printed):
    """What differs between two plans.

    Attributes:
        one, other: The plans.
        moved: Tensors with different shardings.
        sent: Communication that differs, the largest difference in time first.
    """

    one: "PlanData"
    other: "PlanData"
    moved: tuple[Moved, ...]
    sent: tuple[SentDifference, ...]

    @property
    def is_same(self) -> bool:
        """Whether the plans have the same mesh, shardings, collectives and cost."""
        same = self.one.mesh == self.other.mesh and self.one.cost == self.other.cost
        return same and not self.moved and not self.sent

    @property
    def problems(self) -> tuple[str, ...]:
        """Arguments that differ in shape or dtype, or that only one plan has: the plans solve different problems."""
        staged = bool(self.one.stages or self.other.stages)  # their state is known only in parts
        mine, theirs = (
            {t.path: f"{t.dtype}{list(t.shape)}" for t in p.arguments if t.role != "static"}
            for p in (self.one, self.other)
        )
        data = {t.path for p in (self.one, self.other) for t in p.arguments if t.role == "data"}
        paths = [path for path in dict.fromkeys((*mine, *theirs)) if path in data or not staged]
        pairs = [(path, mine.get(path, "not there"), theirs.get(path, "not there")) for path in paths]
        return tuple(f"{path} is {a} in one and {b} in the other" for path, a, b in pairs if a != b)

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [self._figures()]
        if self.problems:
            more = f"; {len(self.problems) - 1} more arguments differ" if len(self.problems) > 1 else ""
            note = (
                f"the plans are for different problems: {self.problems[0]}{more}. Their costs do not compare methods."
            )
            parts.insert(0, Text(note, style="bold"))
        if self.is_same:
            return Group(*parts, Text("the plans have the same shardings and cost"))
        if self.moved:
            parts.append(self._tensors())
        if self.sent:
            parts.append(self._communication())
        return Group(*parts)

    def _figures(self) -> RenderableType:
        a, b = self.one, self.other
        table = plain_table("", ("", "one", "other"), ("difference",))
        table.add_row("plan", f"{a.method} on mesh {mesh_text(a)}", f"{b.method} on mesh {mesh_text(b)}", "")
        table.add_row("verdict", str(a.verdict), str(b.verdict), "")
        for name in ("total", "compute", "communication"):
            x, y = (float(getattr(p.cost, name)) for p in (a, b))
            table.add_row("step" if name == "total" else name, cost_text(a, x), cost_text(b, y), _percent(x, y))
        x, y = float(a.memory.peak_bytes), float(b.memory.peak_bytes)
        table.add_row("memory", format_bytes(x), format_bytes(y), _percent(x, y))
        return table

    def _tensors(self) -> RenderableType:
        table = plain_table("tensors sharded differently", ("path", "one", "other", "kind in one", "kind in other"))
        for row in self.moved[:_MOST_ROWS]:
            layers = f": {their_layers}" if (their_layers := which(row.paths)) else ""
            times = f"  ({len(row.paths)}×{layers})" if len(row.paths) > 1 else ""
            cells = [side.symbols if side else "not there" for side in (row.one, row.other)]
            kinds = [side.kind if side else "" for side in (row.one, row.other)]
            table.add_row(row.path + times, *cells, *kinds)
        left = len(self.moved) - _MOST_ROWS
        return Group(table, Text(f"{left} more rows")) if left > 0 else table

    def _communication(self) -> RenderableType:
        table = plain_table("communication that differs", ("kind", "axes", "phase"), ("one", "other", "time"))
        for row in self.sent[:_MOST_ROWS]:
            change = row.seconds[1] - row.seconds[0]
            time = f"{'+' if change >= 0 else '−'}{cost_text(self.one, abs(change))}"
            table.add_row(row.kind, "+".join(row.axes), row.phase, *map(format_bytes, row.bytes), time)
        return table


def diff(one: "PlanData", other: "PlanData") -> Difference:
    """See `Plan.diff`."""
    return Difference(one, other, tuple(_moved(one, other)), tuple(_sent(one, other)))


def _moved(one: "PlanData", other: "PlanData") -> list[Moved]:
    """Tensors whose shardings differ, grouped by their shardings in both plans."""
    mine, theirs = _by_path(one), _by_path(other)
    groups: dict[tuple[TensorRow | None, TensorRow | None], list[str]] = {}
    for path in dict.fromkeys((*mine, *theirs)):
        a, b = mine.get(path), theirs.get(path)
        if a is None or b is None or (a.spec, a.shape, a.dtype) != (b.spec, b.shape, b.dtype):
            groups.setdefault((a, b), []).append(path)
    moved = []
    for (a, b), paths in groups.items():
        row = a or b
        assert row is not None
        moved.append(Moved(row.path if len(paths) > 1 else paths[0], tuple(paths), a, b))
    return moved


def _by_path(plan: "PlanData") -> dict[str, TensorRow]:
    arguments: Sequence[Tensor] = [*plan.arguments, *(t for t in plan.results if t.role != "state")]
    return {path: row for row in plan_rows(plan, arguments) for path in row.paths}


def _sent(one: "PlanData", other: "PlanData") -> list[SentDifference]:
    totals: dict[tuple[str, tuple[str, ...], str], list[float]] = {}
    for place, plan in enumerate((one, other)):
        for (kind, axes, phase, _), (_, size, seconds) in sums_of(_sent_by(plan)):
            row = totals.setdefault((kind, axes, phase), [0.0, 0.0, 0.0, 0.0])
            row[place] += size
            row[2 + place] += seconds
    rows = [SentDifference(*key, (a, b), (s, t)) for key, (a, b, s, t) in totals.items() if (a, s) != (b, t)]
    return sorted(rows, key=lambda row: -abs(row.seconds[1] - row.seconds[0]))


def _sent_by(plan: "PlanData") -> list["Collective"]:
    """All collectives of a step, of all stages together."""
    if not plan.stages:
        return list(plan.collectives)
    from meshwright.parallelism.subject.subject import Subjects

    return [item for subject in Subjects(plan) for item in subject.collectives]


def _percent(one: float, other: float) -> str:
    return f"{100 * (other - one) / one:+.1f}%" if one else ""
