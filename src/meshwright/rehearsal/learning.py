"""From measured parts of plans to corrections of modelled compute, and to a plan's price by what was measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from meshwright.planner.pricing.corrections import Corrections, Sizes, Strategy
from meshwright.planner.reading.details import FreshDetails
from meshwright.plans.plan import PlanData
from meshwright.profiler.measurements import Measurement
from meshwright.rehearsal.parts import Part

LEAST_RATIO = 0.05  # a part takes some time, however much its modelled communication exceeds what was measured


@dataclass(frozen=True)
class Measured:
    """A part of a plan with what was measured of it.

    Attributes:
        plan: The plan.
        part: The part.
        found: The measurement; None where there is none.
    """

    plan: PlanData
    part: Part
    found: Measurement | None

    @property
    def compute_s(self) -> float | None:
        """Measured compute of one run: without what its collectives or their stand-ins take by the model."""
        if self.found is None or self.found.seconds is None:
            return None
        beside = self.part.stand_in_s if self.found.kind == "rehearsed" else self.part.communication_s
        return max(self.found.seconds - beside, LEAST_RATIO * self.part.modelled_s)

    @property
    def ratio(self) -> float | None:
        """Measured ÷ modelled compute."""
        known = self.compute_s
        return known / self.part.modelled_s if known is not None and self.part.modelled_s > 0 else None

    @property
    def price_s(self) -> float:
        """Compute as known, and modelled communication, of one run."""
        known = self.compute_s
        return (self.part.modelled_s if known is None else known) + self.part.communication_s


def corrections(rows: Iterable[Measured], usual: Mapping[int, float] | None = None) -> Corrections:
    """Corrections of modelled compute.

    A strategy of an operation that leads a group gets the ratio of the cheapest measured candidate that has it; other
    strategies of a segment get the mean of its measured ratios, so that neither is preferred for being unknown.

    Args:
        rows: Parts of plans, measured or not.
        usual: Factors of operations in parts that were not measured.
    """
    known = sorted((row for row in rows if row.ratio is not None), key=lambda row: -row.price_s)
    ratios: dict[str, list[float]] = {}
    for row in known:
        ratios.setdefault(row.part.fingerprint, []).append(cast(float, row.ratio))
    found: dict[int, float] = dict(usual or {})
    measured: dict[tuple[Sizes, int, Strategy], float] = {}
    for row in known:
        mean = sum(ratios[row.part.fingerprint]) / len(ratios[row.part.fingerprint])
        strategies = leaders(row.plan)
        for occurrence in row.part.occurrences:
            for index in occurrence:
                found[index] = mean
                if index in strategies:
                    measured[row.plan.mesh.sizes, index, strategies[index]] = cast(float, row.ratio)
    return Corrections(found, measured)


def leaders(plan: PlanData) -> dict[int, Strategy]:
    """The strategy that a new plan has for each operation that leads a group."""
    back = cast(FreshDetails, plan.details).back
    tables, choice, found = back.formulation.tables, back.choice, {}
    for which, group in zip(back.folded.group_class, back.grouping.groups, strict=True):
        candidates = tables[which].candidates
        if group.leader is not None and candidates is not None:
            found[group.leader] = tuple(candidates.loops[int(choice[which])].tolist())
    return found


def compute_s(rows: Sequence[Measured], corrected: Corrections) -> tuple[float, float]:
    """Compute of a plan's parts in one step: measured, and modelled with corrections."""
    measured = modelled = 0.0
    for row in rows:
        known = row.compute_s
        if known is not None:
            measured += row.part.count * known
        else:
            factors = [corrected.usual.get(index, 1.0) for index in row.part.operations]
            modelled += row.part.count * row.part.modelled_s * (sum(factors) / max(len(factors), 1))
    return measured, modelled
