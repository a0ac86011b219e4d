"""Summarises rows that were replayed as plans: errors against published steps, and the distance to recipes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Table, plain_text
from meshwright.validation.replay_plans import PlanReplay
from meshwright.validation.validation import Target, target_of, target_table

_WITHIN = 0.15


@dataclass(frozen=True)
class PlanValidation:
    """Rows replayed as plans and their summary; print it."""

    rows: tuple[PlanReplay, ...]

    @property
    def expressed(self) -> tuple[PlanReplay, ...]:
        """The rows that have a plan and a published time."""
        return tuple(row for row in self.rows if row.error is not None)

    @property
    def targets(self) -> tuple[Target, ...]:
        """The figures to reach."""
        rows = self.expressed
        errors = [abs(row.error) for row in rows if row.error is not None]
        apart = [abs(row.difference) for row in rows if row.difference is not None]
        return (
            target_of("mean error of plans' step time", errors, mean, 0.08),
            target_of("plans within 15% of published", [float(e <= _WITHIN) for e in errors], mean, 0.85, least=True),
            target_of("median distance of plan and recipe", apart, median, 0.05),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        summary = [{"name": t.name, "value": t.value, "bound": t.bound, "count": t.count} for t in self.targets]
        left_out = Counter(row.problem for row in self.rows if row.problem)
        return {"rows": [row.to_json() for row in self.rows], "summary": summary, "left_out": dict(left_out)}

    def __str__(self) -> str:
        return plain_text(plan_validation_view(self), width=140)


def plan_validation_view(validation: PlanValidation) -> RenderableType:
    """All tables."""
    parts: list[RenderableType] = [_rows(validation), Text(), target_table(validation.targets)]
    others = [row for row in validation.rows if row.problem]
    if others:
        parts += [Text(), _left_out(others)]
    return Group(*parts)


def _left_out(others: Sequence[PlanReplay]) -> Table:
    """The rows without a plan, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for row in others:
        by_reason.setdefault(row.problem, []).append(row.recipe.row.id)
    count = len(others)
    table = Table(title=f"{count} row{'s' * (count > 1)} without a plan", title_justify="left")
    for name in ("rows", "reason", "which"):
        table.add_column(name, justify="right" if name == "rows" else "left", overflow="fold")
    for reason, rows in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        table.add_row(str(len(rows)), reason, ", ".join(rows))
    return table


def _rows(validation: PlanValidation) -> Table:
    table = Table(title="published steps, planned and simulated", title_justify="left")
    names = ("row", "model", "trust", "method", "plan s", "recipe s", "published s", "plan's error", "recipe's")
    for name in names:
        table.add_column(name, justify="left" if name in ("row", "model", "trust", "method") else "right")
    for row in validation.expressed:
        recipe = row.recipe
        steps = (row.step_s, recipe.predicted_step_s, recipe.published_step_s)
        table.add_row(
            recipe.row.id,
            recipe.row.text("model"),
            recipe.row.trust,
            row.method,
            *("" if step is None else f"{step:.4g}" for step in steps),
            *("" if error is None else f"{error:+.1%}" for error in (row.error, recipe.error)),
        )
    return table
