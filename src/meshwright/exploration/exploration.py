"""Clusters that were tried for one function: figures, ranking, and the Pareto front of speed and price."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from meshwright.console import Printed
from meshwright.exploration.offer import Offer
from meshwright.exploration.text import exploration_view, save_picture

#: The objectives, and whether more of each is better.
OBJECTIVES = {"tokens_per_dollar": True, "tokens_per_s": True, "step_s": False, "mfu": True}


@dataclass(frozen=True)
class Exploration(Printed):
    """Clusters and how they rank; print it.

    Attributes:
        offers: The clusters, best first; those without a plan or a price come last.
        objective: The figure that they are ranked by.
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
        save_picture(self.offers, self.pareto, Path(path))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        front = {id(offer) for offer in self.pareto}
        rows = [offer.to_json() | {"pareto": id(offer) in front} for offer in self.offers]
        return {"objective": self.objective, "offers": rows}

    def __rich__(self) -> RenderableType:
        return exploration_view(self.offers, self.pareto, self.objective)


def _known(value: float | None) -> float:
    assert value is not None
    return value
