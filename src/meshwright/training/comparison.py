"""The result of a comparison of methods: one row for each, as a table for people and as plain data for programs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Printed, Table
from meshwright.facade import Plan
from meshwright.plans.text import cost_text
from meshwright.units import format_bytes

_NOTHING = "–"


@dataclass(frozen=True)
class ComparedMethod:
    """One method: its plan's predictions, and the figures of the compiled program and of its runs.

    Attributes:
        method: Its name.
        mesh: Axis names and sizes of the mesh that it chose.
        predicted_s: Time of a step as simulated, communication beside compute; on an abstract mesh the sum of costs, in
            its own units.
        measured_s: Median time of a step.
        predicted_peak_bytes: Memory of one device by the model.
        compiled_peak_bytes: Bytes that XLA allocates on one device: arguments, temporaries, and results that alias no
            argument.
        predicted_collective_bytes: Bytes of all collectives of one step, by the convention of `Mesh.collective_s`.
        compiled_collective_bytes: The same, of the compiled program.
        reason: Why there is no plan, or why it was not run; empty where nothing went wrong.
        plan: The plan.

    Figures that are not known are None.
    """

    method: str
    mesh: dict[str, int] | None = None
    predicted_s: float | None = None
    measured_s: float | None = None
    predicted_peak_bytes: int | None = None
    compiled_peak_bytes: int | None = None
    predicted_collective_bytes: int | None = None
    compiled_collective_bytes: int | None = None
    reason: str = ""
    plan: Plan | None = field(default=None, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """All but the plan, as plain data."""
        return {name: value for name, value in vars(self).items() if name != "plan"}


@dataclass(frozen=True)
class Comparison(Printed):
    """Methods side by side; made by `mw.compare`, and printed as a table.

    Attributes:
        rows: One for each method, in the order in which they were given.
        steps: How many steps of each were timed; 0 where none ran.
        note: Why nothing was run, where that was asked for; empty otherwise.
    """

    rows: tuple[ComparedMethod, ...]
    steps: int
    note: str = ""

    @property
    def best(self) -> ComparedMethod | None:
        """The row of the shortest step: measured where any was, else predicted.

        None where no method has a plan.
        """
        for figure in ("measured_s", "predicted_s"):
            rows = [row for row in self.rows if getattr(row, figure) is not None]
            if rows:
                return min(rows, key=attrgetter(figure))
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain data: the rows without their plans, the steps and the note."""
        return {"steps": self.steps, "note": self.note, "rows": [row.to_json() for row in self.rows]}

    def __rich__(self) -> RenderableType:
        return Group(self._table(), *([Text(self.note)] if self.note else []))

    def _table(self) -> Table:
        title = "methods: predicted → compiled or measured" if self._is_compiled else "methods: predicted"
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("method", no_wrap=True)
        table.add_column("mesh", no_wrap=True)
        for name in ("step", "memory", "collectives"):
            table.add_column(name, justify="right", no_wrap=True)
        if any(row.reason for row in self.rows):
            table.add_column("remark", overflow="fold")
        best = self.best
        for row in self.rows:
            table.add_row(*self._cells(row), style="bold" if row is best else None)
        return table

    @property
    def _is_compiled(self) -> bool:
        return any(row.compiled_peak_bytes is not None for row in self.rows)

    def _cells(self, row: ComparedMethod) -> Sequence[str]:
        def seconds(value: float) -> str:
            return cost_text(row.plan, value) if row.plan is not None else str(value)

        def pair(predicted: Any, found: Any, show: Callable[[Any], str]) -> str:
            shown = [_NOTHING if value is None else show(value) for value in (predicted, found)]
            return " → ".join(shown) if self._is_compiled and predicted is not None else shown[0]

        cells = (
            row.method,
            "×".join(map(str, row.mesh.values())) if row.mesh else _NOTHING,
            pair(row.predicted_s, row.measured_s, seconds),
            pair(row.predicted_peak_bytes, row.compiled_peak_bytes, format_bytes),
            pair(row.predicted_collective_bytes, row.compiled_collective_bytes, format_bytes),
        )
        return (*cells, row.reason) if any(r.reason for r in self.rows) else cells
