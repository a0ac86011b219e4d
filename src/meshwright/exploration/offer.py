"""One cluster that was tried for a function: its plan, its simulated step and its price."""

from dataclasses import dataclass
from typing import Any

from meshwright.facade import Plan
from meshwright.hardware import Cluster
from meshwright.simulator.simulation import Simulation

_HOUR = 3600.0


@dataclass(frozen=True)
class Offer:
    """One cluster.

    Attributes:
        cluster: The cluster.
        plan: The best plan on it; None where there is none.
        simulation: Its simulated step; likewise.
        dollars_per_hour: Price of the whole cluster; None where it is not known.
        price_source: The source of the price.
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
