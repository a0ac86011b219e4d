"""Summarises replayed rows: the errors against the simulation's targets, and the order of strategies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, median
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Table, plain_text
from meshwright.validation.replay import Replay

_WITHIN = 0.15
_EQUAL = 0.02  # published times that differ by less say nothing about the order of strategies


@dataclass(frozen=True)
class Target:
    """One figure that the simulation must reach.

    Attributes:
        name: Its name.
        value: The value reached; None where no row has it.
        bound: The value to be reached.
        least: Whether the bound is the least rather than the most.
        count: The number of rows or pairs.
    """

    name: str
    value: float | None
    bound: float
    least: bool
    count: int

    @property
    def reached(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bound if self.least else self.value <= self.bound


@dataclass(frozen=True)
class Validation:
    """Replayed rows and their summary; print it."""

    rows: tuple[Replay, ...]

    @property
    def targets(self) -> tuple[Target, ...]:
        """The figures to reach."""
        rows = [r for r in self.rows if r.error is not None]
        trusted = _errors(r for r in rows if r.row.trust == "A")
        half = _errors(r for r in rows if r.row.is_half)
        memory = [abs(r.memory_error) for r in self.rows if r.memory_error is not None]
        ran = [r.fits for r in rows if r.fits is not None]
        pairs = list(ordered_pairs(self.rows))
        return (
            target_of("mean error of step time, trust A", trusted, mean, 0.10),
            target_of("median error of step time, trust A", trusted, median, 0.06),
            target_of("rows within 15%, trust A", [e <= _WITHIN for e in trusted], mean, 0.90, least=True),
            target_of("mean error of step time, all bf16 and fp16", half, mean, 0.12),
            target_of("mean error of peak memory", memory, mean, 0.10),
            target_of("rows that ran, called out of memory", [not fits for fits in ran], mean, 0.05),
            target_of("pairs of strategies in the right order", pairs, mean, 0.85, least=True),
        )

    @property
    def worst(self) -> tuple[Replay, ...]:
        """Rows that are off by more than 15%, worst first."""
        errors = [(abs(r.error), r) for r in self.rows if r.error is not None and abs(r.error) > _WITHIN]
        return tuple(r for _, r in sorted(errors, key=lambda pair: -pair[0]))

    @property
    def problems(self) -> tuple[Replay, ...]:
        """Rows that could not be understood."""
        return tuple(r for r in self.rows if r.problem)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        summary = [
            {
                "name": t.name,
                "value": t.value,
                "bound": t.bound,
                "least": t.least,
                "count": t.count,
                "reached": t.reached,
            }
            for t in self.targets
        ]
        return {"rows": [replay.to_json() for replay in self.rows], "summary": summary}

    def __str__(self) -> str:
        return plain_text(validation_view(self), width=140)


def ordered_pairs(rows: Sequence[Replay]) -> Iterable[bool]:
    """For each two strategies of one source, model and machine, whether the faster one is predicted to be so."""
    groups: dict[tuple[str, ...], list[Replay]] = {}
    for replay in rows:
        if replay.error is not None and replay.row.number("global_batch"):
            key = tuple(replay.row.text(name) for name in ("source", "model", "seq", "gpu_type", "gpus"))
            groups.setdefault(key, []).append(replay)
    for members in groups.values():
        for one, other in combinations(members, 2):
            published = _per_sequence(one.published_step_s, one), _per_sequence(other.published_step_s, other)
            if one.strategy == other.strategy or abs(published[0] / published[1] - 1) < _EQUAL:
                continue
            predicted = _per_sequence(one.predicted_step_s, one), _per_sequence(other.predicted_step_s, other)
            yield (published[0] < published[1]) == (predicted[0] < predicted[1])


def _per_sequence(seconds: float | None, replay: Replay) -> float:
    batch = replay.row.number("global_batch")
    assert seconds is not None and batch
    return seconds / batch


def _errors(rows: Iterable[Replay]) -> list[float]:
    return [abs(r.error) for r in rows if r.error is not None]


def target_of(name: str, values: Sequence[float], how: Any, bound: float, least: bool = False) -> Target:
    """A target for the mean, or the like, of some values; unknown where there are none."""
    return Target(name, float(how(values)) if values else None, bound, least, len(values))


def validation_view(validation: Validation) -> RenderableType:
    """All tables."""
    parts: list[RenderableType] = [_rows(validation), Text(), target_table(validation.targets)]
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


def target_table(targets: tuple[Target, ...]) -> Table:
    """Figures with their targets."""
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
