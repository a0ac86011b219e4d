"""Clusters that were tried for one function: figures, ranking, and which of them no other beats on both counts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from meshwright.hardware import Cluster
from meshwright.plans.plan import Plan
from meshwright.screen import Printed
from meshwright.simulator.simulation import Simulation

#: What can be ranked by, and whether more of it is better.
OBJECTIVES = {"tokens_per_dollar": True, "tokens_per_s": True, "step_s": False, "mfu": True}
_HOUR = 3600.0


@dataclass(frozen=True)
class Offer:
    """One cluster.

    Attributes:
        cluster: The cluster.
        plan: The best plan on it; None where there is none.
        simulation: Its simulated step; likewise.
        dollars_per_hour: Price of the whole cluster; None where it is not known.
        price_source: Who says so.
        problem: Why there is no plan; empty where there is one.
    """

    cluster: Cluster
    plan: Plan | None
    simulation: Simulation | None
    dollars_per_hour: float | None
    price_source: str
    problem: str

    @property
    def step_s(self) -> float | None:
        return self.simulation.step_s if self.simulation else None

    @property
    def mfu(self) -> float | None:
        return self.simulation.mfu if self.simulation else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.simulation.tokens_per_s if self.simulation else None

    @property
    def tokens_per_dollar(self) -> float | None:
        """Tokens that one dollar of rent trains on."""
        if self.tokens_per_s is None or self.dollars_per_hour is None:
            return None
        return self.tokens_per_s * _HOUR / self.dollars_per_hour

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "cluster": self.cluster.name,
            "num_devices": self.cluster.num_devices,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "peak_bytes": self.simulation.peak_bytes if self.simulation else None,
            "dollars_per_hour": self.dollars_per_hour,
            "price_source": self.price_source,
            "tokens_per_dollar": self.tokens_per_dollar,
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Exploration(Printed):
    """Clusters and how they rank; print it.

    Attributes:
        offers: The clusters, best first; those without a plan or a price come last.
        objective: What they are ranked by.
    """

    offers: tuple[Offer, ...]
    objective: str

    @property
    def best(self) -> Offer | None:
        """The first that has a plan and the objective's figure."""
        return next((o for o in self.offers if getattr(o, self.objective) is not None), None)

    @property
    def pareto(self) -> tuple[Offer, ...]:
        """Clusters that no other one beats in both speed and tokens for a dollar, fastest first."""
        priced = [o for o in self.offers if o.tokens_per_dollar is not None]
        kept: list[Offer] = []
        for offer in sorted(priced, key=lambda o: (-_known(o.tokens_per_s), -_known(o.tokens_per_dollar))):
            if not kept or _known(offer.tokens_per_dollar) > _known(kept[-1].tokens_per_dollar):
                kept.append(offer)
        return tuple(kept)

    def ranked(self) -> "Exploration":
        """The same, best first."""
        sign = -1.0 if OBJECTIVES[self.objective] else 1.0

        def key(offer: Offer) -> tuple[bool, bool, float]:
            value = getattr(offer, self.objective)
            return offer.plan is None, value is None, sign * value if value is not None else 0.0

        return replace(self, offers=tuple(sorted(self.offers, key=key)))

    def save_picture(self, path: str | Path) -> None:
        """Draws speed against tokens for a dollar as an SVG file; the Pareto front is marked."""
        from meshwright.simulator.explore.picture import save_picture

        save_picture(self, Path(path))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        front = {id(offer) for offer in self.pareto}
        rows = [offer.to_json() | {"pareto": id(offer) in front} for offer in self.offers]
        return {"objective": self.objective, "offers": rows}

    def __rich__(self) -> RenderableType:
        from meshwright.simulator.explore.text import exploration_view

        return exploration_view(self)


def _known(value: float | None) -> float:
    assert value is not None
    return value
