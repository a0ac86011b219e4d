"""The compiled program's collectives, each traced back to the user's source line and to the plan's prediction.

XLA merges, splits and widens planned collectives, so a compiled collective counts as foreseen if the plan has one of
its kind and axes at the same source line, or still has that many bytes of its kind and axes elsewhere. The remaining
collectives were not foreseen: XLA added them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Printed, plain_table
from meshwright.parallelism.words import label_words
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from meshwright.plans.plan import Collective, PlanData
    from meshwright.runtime.checking.compiled import CompiledCollective

_ENOUGH = 0.5  # share of a collective's bytes that must have been planned for it to count as foreseen
_RUNTIME = "/meshwright/runtime/"
_SMALL = 1024  # bytes below which XLA's additions (counters, flags) are not worth a mark


@dataclass(frozen=True, slots=True)
class TracedCollective:
    """One compiled collective.

    Attributes:
        compiled: The compiled collective.
        planned: The planned collectives whose bytes it moves.
        foreseen: Whether enough of its bytes were planned.
    """

    compiled: "CompiledCollective"
    planned: "tuple[Collective, ...]"
    foreseen: bool

    @property
    def source(self) -> str:
        """The user's source line: XLA's, or the plan's where XLA names our own runtime or nothing."""
        line = self.compiled.source if _RUNTIME not in self.compiled.source else ""
        return line or next((c.source for c in self.planned if c.source), "")

    @property
    def purpose(self) -> str:
        """Its planned purpose, in a few words."""
        named = dict.fromkeys(f"{c.purpose} of {label_words(c.operation)}" for c in self.planned)
        return ", ".join(list(named)[:2]) or "nothing"


@dataclass(frozen=True)
class After(Printed):
    """All collectives of a compiled program."""

    collectives: tuple[TracedCollective, ...]

    @property
    def unforeseen(self) -> tuple[TracedCollective, ...]:
        return tuple(c for c in self.collectives if not c.foreseen)

    def annotate(self, text: str) -> str:
        """The compiled program with a note behind each collective: its source line and its planned purpose."""
        notes = {item.compiled.name: item for item in self.collectives}
        lines = text.splitlines()
        for i, line in enumerate(lines):
            item = notes.get(line.partition("=")[0].strip(" %"))
            if item is not None:
                word = f"planned for {item.purpose}" if item.foreseen else "NOT FORESEEN"
                lines[i] = f"{line}  // {item.source or 'no source line'}; {word}"
        return "\n".join([*lines, ""])

    def __rich__(self) -> RenderableType:
        table = plain_table("compiled collectives", ("", "kind", "axes", "source", "planned for"), ("bytes",))
        for item in self.collectives:
            compiled, planned = item.compiled, item.purpose
            size = format_bytes(compiled.bytes * compiled.trips)
            mark = "" if item.foreseen else "!"
            table.add_row(mark, compiled.kind, "+".join(compiled.axes), _short(item.source), planned, size)
        count = len(self.unforeseen)
        note = f"! marks {count} that the plan did not foresee" if count else "the plan foresaw all of them"
        return Group(table, Text(note))


def trace_back(plan: "PlanData", made: Iterable["CompiledCollective"], scatters: bool) -> After:
    """Compares compiled collectives with the plan's.

    Args:
        plan: The plan.
        made: The compiled collectives.
        scatters: Whether the backend has a reduce-scatter; XLA's for CPUs uses an all-reduce of as many bytes.
    """
    pools: dict[tuple[str, tuple[str, ...]], list[list]] = {}  # planned collectives, each with the bytes it has left
    for item in plan.collectives:
        kind = "all_reduce" if item.kind == "reduce_scatter" and not scatters else item.kind
        pools.setdefault((kind, item.axes), []).append([item, item.bytes * item.trips])
    traced: dict[int, TracedCollective] = {}
    compiled = list(made)
    for by_line in (True, False):
        for number, one in enumerate(compiled):
            if number not in traced:
                taken = _take(pools.get((one.kind, one.axes), []), one, by_line)
                if taken is not None or not by_line:
                    small = one.bytes * one.trips < _SMALL
                    traced[number] = TracedCollective(one, taken or (), taken is not None or small)
    return After(tuple(traced[number] for number in range(len(compiled))))


def _take(pool: list[list], item: "CompiledCollective", by_line: bool) -> "tuple[Collective, ...] | None":
    """Takes a collective's bytes from the planned ones; None where there are not enough."""
    wanted = float(item.bytes * item.trips)
    usable = [e for e in pool if not by_line or _same_line(item.source, e[0].source)]
    if not usable or (not by_line and sum(entry[1] for entry in usable) < _ENOUGH * wanted):
        return None
    users = []
    for entry in usable:
        if wanted <= 0:
            break
        used = min(wanted, entry[1])
        entry[1] -= used
        wanted -= used
        users += [entry[0]] if used else []
    return tuple(users) or (usable[0][0],)


def _same_line(compiled: str, planned: str) -> bool:
    """``file:line`` against ``file:line:column (function)``."""
    return bool(compiled) and planned.split(" ")[0].split(":")[:2] == compiled.split(":")[:2]


def _short(source: str) -> str:
    """The end of a long path."""
    parts: Sequence[str] = source.split("/")
    return "/".join(parts[-2:])
