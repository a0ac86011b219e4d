"""What each decision about a whole step is worth: the quickest plan of the search that decides it otherwise.

Nothing is searched for: these are the plans that the search made, and what it found not to fit. Where no other way was
looked into, either it was asked for, and the table says so, or nothing else promised to be quicker.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Printed, plain_table
from meshwright.parallelism.sentence import plain_sentence
from meshwright.parallelism.words import recomputed_words
from meshwright.plans.text import cost_text
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from meshwright.plans.plan import Compared, PlanData

_WRITTEN = {"as written": "as the program says", "none": "nothing"}
_MOST_SHOWN = 10


class Decision(NamedTuple):
    """One decision, and the quickest plan that decides otherwise.

    Attributes:
        name: What is decided.
        taken: What the plan does.
        instead: The other plan; None where none was looked into.
        is_asked: Whether the method fixes it.
    """

    name: str
    taken: str
    instead: "Compared | None"
    is_asked: bool = False

    @property
    def without(self) -> str:
        """What is said where there is no other plan."""
        return "it was asked for" if self.is_asked else "none was looked into"


@dataclass(frozen=True)
class Decisions(Printed):
    """The decisions of a plan about its whole step; it prints them with the other plans that were looked into."""

    plan: "PlanData"
    decisions: tuple[Decision, ...]

    def __rich__(self) -> RenderableType:
        plan = self.plan
        title = f"{plain_sentence(plan)}: {cost_text(plan, plan.step_s)}, {format_bytes(plan.memory.peak_bytes)}"
        table = plain_table("decided", ("decision", "taken", "the quickest plan that decides otherwise"), _FIGURES)
        for decision in self.decisions:
            other = decision.instead
            cells = (decision.without, "", "", "") if other is None else (words(other), *figures(plan, other))
            table.add_row(decision.name, decision.taken, *cells)
        shown = [table]
        if plan.compared:
            others = plain_table("other plans that were looked into", ("plan",), _FIGURES)
            for other in plan.compared[:_MOST_SHOWN]:
                others.add_row(words(other), *figures(plan, other))
            shown.append(others)
        return Group(Text(title, style="bold"), *shown, *map(Text, plan.remarks))


_FIGURES = ("step", "difference", "memory")


def decisions(plan: "PlanData") -> Decisions:
    """The decisions of a plan about its whole step."""
    return Decisions(plan, tuple(_decisions(plan)))


def _decisions(plan: "PlanData") -> Iterator[Decision]:
    asked = plan.provenance.get("asked", ())
    again = plan.pipeline.checkpoint if plan.pipeline is not None else plan.recompute
    yield Decision(
        "microbatches", str(plan.microbatches), _first(plan, "microbatches", plan.microbatches), "microbatches" in asked
    )
    yield Decision("recomputed", _again(again), _first(plan, "recompute", again), "recompute" in asked)
    yield Decision(
        "stages", str(len(plan.stages) or "none"), _first(plan, "num_stages", len(plan.stages)), "stages" in asked
    )
    same = [one for one in plan.compared if (one.microbatches, one.recompute) == (plan.microbatches, again)]
    splits = [one for one in same if one.num_stages == len(plan.stages)]
    yield Decision("splits", "×".join(map(str, plan.mesh.sizes)), splits[0] if splits else None, "splits" in asked)


def _first(plan: "PlanData", name: str, taken: object) -> "Compared | None":
    """The quickest other plan in which something is not as it was taken."""
    return next((one for one in plan.compared if getattr(one, name) != taken), None)


def words(other: "Compared") -> str:
    """A plan that was not taken, in a line."""
    parts = [f"{other.method} on {'×'.join(map(str, other.mesh))}"]
    parts += [f"{other.num_stages} stages"] if other.num_stages else []
    parts += [f"{other.microbatches} microbatches"] if other.microbatches > 1 else []
    parts += [recomputed_words(other.recompute)] if recomputed_words(other.recompute) else []
    return ", ".join(parts)


def figures(plan: "PlanData", other: "Compared") -> tuple[str, str, str]:
    """Its step, the difference from the plan's, and its memory."""
    if other.step_s is None:
        return "does not fit", "", f"≥ {format_bytes(other.peak_bytes)}"
    more = other.step_s / plan.step_s - 1 if plan.step_s else 0.0
    return cost_text(plan, other.step_s), f"{more:+.1%}", format_bytes(other.peak_bytes)


def _again(policy: str) -> str:
    return recomputed_words(policy).removesuffix(" recomputed") or _WRITTEN.get(policy, policy)
