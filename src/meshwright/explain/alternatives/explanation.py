"""The data of an explanation: a tensor's sharding, the price of every other one, and the reason for the choice."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Printed, plain_table
from meshwright.explain.alternatives.forced import Change
from meshwright.plans.text import cost_text
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from meshwright.plans.plan import PlanData
    from meshwright.plans.tensor import Spec

BARELY = 1e-9  # relative difference of costs that are the same
_MOST_CHANGES = 3
_MOST_SHOWN = 8


class Effect(NamedTuple):
    """Seconds more than now, negative for less: of one microbatch in the stage, once a step there, of the step."""

    microbatch_s: float
    once_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another sharding of a tensor, and the best plan that has it.

    Attributes:
        spec: The sharding.
        symbols: In symbols.
        words: In words, with the use of each axis.
        cost: Time of one step of the best such plan that was found; inf where none fits.
        at_least: A lower bound on the cost of such plans.
        difference: Of `cost` (of `at_least` where no plan was found) from the plan's own; negative is faster.
        is_exact: Whether `cost` is proved to be optimal.
        allowed: Whether the plan's method allows it.
        fits: Whether the memory allows it.
        peak_bytes: Memory that it needs on each device.
        changes: The parts of the difference, the largest first.
        fix: The argument of `mw.Auto(fix=…)` that forces it: every tied tensor's path with axes for each dim; empty in
            stages.
        effect: In a stage, its effect on a microbatch there, on the work done once a step, and on the step.
    """

    spec: "Spec"
    symbols: str
    words: str
    cost: float
    at_least: float
    difference: float
    is_exact: bool
    allowed: bool
    fits: bool
    peak_bytes: int
    changes: tuple[Change, ...]
    fix: "dict[str, Spec]"
    effect: Effect | None = None


@dataclass(frozen=True)
class Explanation(Printed):
    """Why one tensor is split as it is.

    Attributes:
        path: Its path.
        tied: Paths of the tensors that share its choice, itself among them.
        spec, symbols, words, kind: How it is split.
        cost: Time of one step of the plan.
        alternatives: Other shardings, cheapest first.
        forced_by: The deciding reason: ``cost``, ``memory``, ``method`` or ``shape``.
        reason: The same in a sentence.
        num_left: The number of shardings that were not priced for lack of time.
        stage: The number of the stage that holds it; None without stages.
        counts: The weight of a microbatch of that stage in the step, in words.
    """

    plan: "PlanData"
    path: str
    tied: tuple[str, ...]
    spec: "Spec"
    symbols: str
    words: str
    kind: str
    cost: float
    alternatives: tuple[Alternative, ...]
    forced_by: str
    reason: str
    num_left: int = 0
    stage: int | None = None
    counts: str = ""

    def __rich__(self) -> RenderableType:
        tied = f", tied to {len(self.tied) - 1} others like it" if len(self.tied) > 1 else ""
        lines = [
            Text(f"{self.path} is {self.symbols}: {self.words}{tied}", style="bold"),
            Text(f"kind    {self.kind}"),
            Text(f"cost    {cost_text(self.plan, self.cost)} a step with this choice"),
            *self._where(),
            Text(f"reason  {self.reason}"),
        ]
        if not self.alternatives:
            return Group(*lines)
        stage = () if self.stage is None else ("a microbatch", "once")
        table = plain_table("instead", ("sharding", "in words"), (*stage, "step", "difference", "memory"))
        table.add_column("because", overflow="fold")
        for a in self.alternatives[:_MOST_SHOWN]:
            table.add_row(a.symbols, a.words, *self._in_stage(a), *self._figures(a), self._because(a))
        hidden = max(0, len(self.alternatives) - _MOST_SHOWN)
        notes = [f"{hidden} more are not shown; none of them is cheaper."] * bool(hidden)
        notes += [f"{self.num_left} more were not priced in the time allowed."] * bool(self.num_left)
        return Group(*lines, table, *map(Text, notes))

    def _where(self) -> list[Text]:
        if self.stage is None:
            return []
        stage = self.plan.stages[self.stage]
        each = cost_text(self.plan, stage.microbatch_s)
        return [Text(f"stage   {self.stage}, {each} a microbatch; {self.counts}")]

    def _in_stage(self, a: Alternative) -> tuple[str, ...]:
        """The extra time of a microbatch in the stage, and of the work done once a step."""
        if a.effect is None:
            return ()
        if a.cost == float("inf"):
            return "", ""
        return _signed(self.plan, a.effect.microbatch_s), _signed(self.plan, a.effect.once_s)

    def _figures(self, a: Alternative) -> tuple[str, str, str]:
        memory = format_bytes(a.peak_bytes) if a.peak_bytes else ""
        if a.at_least == float("inf"):
            return "none", "", memory
        mark = "≥ " if a.cost == float("inf") else "" if a.is_exact else "≤ "
        figure = a.at_least if a.cost == float("inf") else a.cost
        return mark + cost_text(self.plan, figure), mark + _signed(self.plan, a.difference), memory

    def _because(self, a: Alternative) -> str:
        by = "in the plan that Auto took" if self.plan.method == "Auto" else f"by {self.plan.method}"
        notes = [] if a.allowed else [f"not allowed {by}"]
        if not a.fits:
            notes.append("does not fit the memory")
        elif a.at_least == float("inf"):
            notes.append("no plan has this sharding")
        elif a.cost == float("inf") and not a.peak_bytes:
            notes.append("lower bound only, not solved for")
        elif a.cost == float("inf"):
            notes.append("the fastest such plan does not fit the memory, and no slower one that fits was found in time")
        notes += [
            f"{_signed(self.plan, change.seconds)} {change.what}: {change.where}"
            for change in a.changes[:_MOST_CHANGES]
        ]
        return "; ".join(notes)


def _signed(plan: "PlanData", seconds: float) -> str:
    """A difference of costs; rounding errors count as zero."""
    if abs(seconds) <= BARELY * plan.cost.total:
        return "+0"
    return f"{'+' if seconds >= 0 else '−'}{cost_text(plan, abs(seconds))}"
