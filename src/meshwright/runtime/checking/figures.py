"""Planned and compiled figures side by side, as a table for people and as plain data for programs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from meshwright.units import format_bytes

Kind = tuple[str, tuple[str, ...]]  # the kind of a collective and its axes


@dataclass(frozen=True)
class Compared:
    """One figure, planned and compiled."""

    planned: float
    compiled: float

    @property
    def ratio(self) -> float:
        """Compiled ÷ planned; 1 where both are zero."""
        return self.compiled / self.planned if self.planned else (1.0 if not self.compiled else float("inf"))

    def __add__(self, other: "Compared") -> "Compared":
        return Compared(self.planned + other.planned, self.compiled + other.compiled)

    def to_json(self) -> dict[str, float | None]:
        """Plain data; the ratio is None where nothing was planned."""
        ratio = self.ratio if isfinite(self.ratio) else None
        return {"planned": self.planned, "compiled": self.compiled, "ratio": ratio}


def total(pairs: Iterable[Compared]) -> Compared:
    """The sum of figures."""
    return sum(pairs, Compared(0.0, 0.0))


def by_kind(planned: Iterable[Any], made: Iterable[Any], scatters: bool) -> dict[Kind, Compared]:
    """Bytes of collectives by kind and axes.

    Args:
        planned: The plan's collectives.
        made: Those of the compiled program.
        scatters: Whether the backend has reduce-scatters: XLA's CPU backend has none, and sends the same bytes in an
            all-reduce, followed by a slice.
    """
    totals: list[Counter[Kind]] = []
    for items in (planned, made):
        found: Counter[Kind] = Counter()
        for item in items:
            kind = "all_reduce" if item.kind == "reduce_scatter" and not scatters else item.kind
            found[kind, tuple(item.axes)] += item.bytes * item.trips
        totals.append(found)
    keys = sorted({*totals[0], *totals[1]})
    return {key: Compared(float(totals[0][key]), float(totals[1][key])) for key in keys}


def kinds_to_json(collectives: Mapping[Kind, Compared]) -> list[dict[str, Any]]:
    """Collectives as plain data."""
    return [{"kind": kind, "axes": list(axes), **pair.to_json()} for (kind, axes), pair in collectives.items()]


def byte_rows(named: Iterable[tuple[str, Compared]]) -> list[Sequence[str]]:
    """Rows of a table of bytes."""
    return [
        (name, format_bytes(pair.planned), format_bytes(pair.compiled), f"{pair.ratio:.3f}") for name, pair in named
    ]


def flops_row(pair: Compared) -> Sequence[str]:
    """The row of flops."""
    return "flops", f"{pair.planned:.3g}", f"{pair.compiled:.3g}", f"{pair.ratio:.3f}"


def named_kinds(collectives: Mapping[Kind, Compared]) -> list[tuple[str, Compared]]:
    """Collectives with names for people."""
    return [(f"{kind} over {', '.join(axes)}", pair) for (kind, axes), pair in sorted(collectives.items())]


def figures_table(rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; a row of one cell is a heading."""
    shown = [("", "planned", "compiled", "ratio"), *rows]
    widths = [max(len(row[i]) for row in shown if len(row) == 4) for i in range(4)]
    return [
        row[0] if len(row) == 1 else "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in shown
    ]
