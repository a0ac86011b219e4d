"""A validation for people: row by row, what was reached, and why the worst rows are off."""

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.screen import Table, plain_text
from meshwright.simulator.published.replay import Replay
from meshwright.simulator.published.validation import Target, Validation


def validation_text(validation: Validation) -> str:
    """What `print` shows."""
    return plain_text(validation_view(validation), width=140)


def validation_view(validation: Validation) -> RenderableType:
    """All tables."""
    parts: list[RenderableType] = [_rows(validation), Text(), _summary(validation.targets)]
    if validation.worst:
        parts += [Text(), _worst(validation)]
    if validation.problems:
        lines = "\n".join(replay.problem for replay in validation.problems)
        count = len(validation.problems)
        parts += [Text(), Text(f"{count} row{'s' * (count > 1)} could not be understood:\n{lines}")]
    return Group(*parts)


def _rows(validation: Validation) -> Table:
    table = Table(title="published steps, simulated", title_justify="left")
    names = ("row", "model", "trust", "predicted s", "published s", "error", "peak GiB", "published", "error", "fits")
    for name in names:
        table.add_column(name, justify="left" if name in ("row", "model", "trust", "fits") else "right")
    for replay in validation.rows:
        row = replay.row
        table.add_row(
            row.id,
            row.text("model"),
            row.trust,
            _number(replay.predicted_step_s),
            _number(replay.published_step_s),
            _percent(replay.error) if not replay.problem else "not understood",
            _number(replay.predicted_peak_gib),
            _number(replay.published_peak_gib),
            _percent(replay.memory_error) if not replay.problem else "",
            {True: "yes", False: "no", None: ""}[replay.fits],
        )
    return table


def _summary(targets: tuple[Target, ...]) -> Table:
    table = Table(title="what must be reached", title_justify="left")
    for name in ("figure", "over", "reached", "target", ""):
        table.add_column(name, justify="left" if name in ("figure", "") else "right")
    for target in targets:
        value = "–" if target.value is None else f"{target.value:.1%}"
        bound = f"{'≥' if target.least else '≤'} {target.bound:.0%}"
        table.add_row(
            target.name, str(target.count), value, bound, {True: "yes", False: "no", None: "–"}[target.reached]
        )
    return table


def _worst(validation: Validation) -> Table:
    table = Table(title="rows off by more than 15%, and what is known to make them hard", title_justify="left")
    for name in ("row", "error", "cause"):
        table.add_column(name, justify="right" if name == "error" else "left")
    for replay in validation.worst:
        table.add_row(replay.row.id, _percent(replay.error), "; ".join(replay.causes) or _unknown(replay))
    return table


def _unknown(replay: Replay) -> str:
    notes = replay.row.text("notes")
    return f"not known; the table says: {notes}" if notes else "not known"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"
