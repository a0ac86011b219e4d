"""From measured parts of plans to corrections of modelled times, and to a plan's price by what was measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import numpy as np

from meshwright.hardware.collectives import KINDS
from meshwright.planner.pricing.corrections import SHARES, CollectiveFactors, Corrections, Sizes, Strategy
from meshwright.planner.reading.details import FreshDetails
from meshwright.plans.plan import PlanData
from meshwright.profiler.measurements import Measurement
from meshwright.rehearsal.learning.fitting import Matrix, fit
from meshwright.rehearsal.parts import MeasuredPart, modelled_communication

NO_FACTORS: CollectiveFactors = MappingProxyType({})
LEAST_RATIO = 0.05  # a part takes some time, however much its modelled communication exceeds what was measured
LEAST_FACTOR = float(np.sqrt(np.finfo(np.float64).eps))  # times are divided by factors, and half of the digits are left


@dataclass(frozen=True)
class Measured:
    """A part of a plan with what was measured of it.

    Attributes:
        plan: The plan.
        part: The part.
        found: The measurement; None where there is none.
    """

    plan: PlanData
    part: MeasuredPart
    found: Measurement | None

    def compute_s(self, factors: CollectiveFactors = NO_FACTORS) -> float | None:
        """Measured compute of one run: without what its collectives or their stand-ins take by the model.

        Args:
            factors: Of collectives, as in `Corrections`.
        """
        if self.found is None or self.found.seconds is None:
            return None
        beside = self.part.stand_in_s if self.found.kind == "rehearsed" else self.communication_s(factors)
        return max(self.found.seconds - beside, LEAST_RATIO * self.part.modelled_s)

    def communication_s(self, factors: CollectiveFactors = NO_FACTORS) -> float:
        """Communication of one run."""
        return sum(factors.get(kind, 1.0) * seconds for kind, seconds in self.part.sent_s.items())

    def ratio(self, factors: CollectiveFactors = NO_FACTORS) -> float | None:
        """Measured ÷ modelled compute."""
        known = self.compute_s(factors)
        return known / self.part.modelled_s if known is not None and self.part.modelled_s > 0 else None


def corrections(rows: Sequence[Measured], usual: Mapping[int, float] | None = None) -> Corrections:
    """Corrections of modelled times.

    Collectives are corrected by kind. Then a strategy of an operation that leads a group gets the ratio of compute of
    the cheapest measured candidate that has it; other strategies of a segment get the mean of its measured ratios, so
    that neither is preferred for being unknown.

    Args:
        rows: Parts of plans, measured or not.
        usual: Factors of operations in parts that were not measured.
    """
    factors = collective_factors(rows)
    known = [(row, ratio) for row in rows if (ratio := row.ratio(factors)) is not None]
    known.sort(key=lambda pair: -(pair[1] * pair[0].part.modelled_s + pair[0].communication_s(factors)))
    ratios: dict[str, list[float]] = {}
    for row, ratio in known:
        ratios.setdefault(row.part.fingerprint, []).append(ratio)
    found: dict[int, float] = dict(usual or {})
    measured: dict[tuple[Sizes, int, Strategy], float] = {}
    for row, ratio in known:
        mean = sum(ratios[row.part.fingerprint]) / len(ratios[row.part.fingerprint])
        strategies = leaders(row.plan)
        for occurrence in row.part.occurrences:
            for index in occurrence:
                found[index] = mean
                if index in strategies:
                    measured[row.plan.mesh.sizes, index, strategies[index]] = ratio
    return Corrections(found, measured, factors)


def collective_factors(rows: Iterable[Measured]) -> dict[tuple[str, str], float]:
    """Measured ÷ modelled time of collectives, from parts that were measured with them: see `Corrections.collectives`.

    The time of such a part is the compute of its segment times one factor, and the starts and the bytes of each kind of
    collective times others. Candidates of a segment that send more or less tell them apart. Where they do not, kinds
    are alike, segments are alike, and collectives are as wrong as compute.
    """
    known = [(row.part, row.found.seconds) for row in rows if row.found and row.found.kind == "whole"]
    whole = [(part, seconds) for part, seconds in known if seconds]
    sent = sorted({key for part, _ in whole for key, seconds in part.sent_s.items() if seconds > 0})
    if not sent:
        return {}
    segments = sorted({part.fingerprint for part, _ in whole})
    shares = np.array(
        [
            [part.modelled_s / seconds * (part.fingerprint == segment) for segment in segments]
            + [part.sent_s.get(key, 0.0) / seconds for key in sent]
            for part, seconds in whole
        ]
    )
    families = ["compute"] * len(segments) + [share for _, share in sent]
    factors, usual = _fit_alike(shares, families)
    found = {(kind, share): usual.get(share, 1.0) for kind in KINDS for share in SHARES}
    return found | dict(zip(sent, factors[len(segments) :].tolist(), strict=True))


def _fit_alike(shares: Matrix, families: Sequence[str]) -> tuple[Matrix, dict[str, float]]:
    """Factors of segments and of shares of collectives, each near the factor of its family; and those of families.

    The factors of families are unknown, too, and near each other. All differences count by what they change in the time
    of parts, so that no unit matters.
    """
    count, names = shares.shape[1], sorted(set(families))
    weight = np.sqrt((shares**2).mean(axis=0))
    prior = np.zeros((count + len(names), count + len(names)))
    for number, family in enumerate(families):
        prior[number, [number, count + names.index(family)]] = weight[number], -weight[number]
    for number, family in enumerate(names):
        own = [w for w, name in zip(weight, families, strict=True) if name == family]
        prior[count + number, count:] = (np.arange(len(names)) == number) - 1 / len(names)
        prior[count + number] *= np.sqrt(np.mean(np.square(own)))
    rows = np.concatenate([shares, np.zeros((len(shares), len(names)))], axis=1)
    found = fit(rows, prior, np.zeros(len(prior)), LEAST_FACTOR)
    return found[:count], dict(zip(names, found[count:].tolist(), strict=True))


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
        known = row.compute_s(corrected.collectives)
        if known is not None:
            measured += row.part.count * known
        else:
            factors = [corrected.usual.get(index, 1.0) for index in row.part.operations]
            modelled += row.part.count * row.part.modelled_s * (sum(factors) / max(len(factors), 1))
    return measured, modelled


def communication_s(plan: PlanData, corrected: Corrections) -> float:
    """Communication of one step of a plan, as it was corrected."""
    factors, sent_s = corrected.collectives, modelled_communication(plan, plan.collectives)
    return sum(factors.get(kind, 1.0) * seconds for kind, seconds in sent_s.items())
