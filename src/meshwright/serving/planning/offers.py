"""Which machines to rent for a load: a model planned on several clusters, and what each would cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Printed, Table
from meshwright.errors import DoesNotFit, ServingError
from meshwright.exploration.rental_prices import cluster_price
from meshwright.hardware import Cluster
from meshwright.profiler import cluster as find_cluster
from meshwright.progress import progress
from meshwright.serving.planning.plan_serving import plan_serving
from meshwright.serving.planning.promise import Slo
from meshwright.serving.planning.serving_plan import ServingPlan
from meshwright.serving.planning.traffic import Traffic

#: Machines that are tried where none are named: one host of each chip that is rented widely.
USUAL = ("1x8 h100", "1x8 h200", "1x8 b200", "1x8 a100-80gb", "1x8 l40s", "1x8 tpu-v6e")


@dataclass(frozen=True)
class ServingOffer:
    """One cluster for a load.

    Attributes:
        cluster: The cluster, which is rented as often as the load needs.
        plan: How the model is served on it; None where it cannot be.
        devices: Devices that carry the load, over as many such clusters as are needed.
        dollars_per_hour: What these cost; None where the price is not known.
        source: Where the price is from.
        problem: Why there is no plan; empty where there is one.
    """

    cluster: Cluster
    plan: ServingPlan | None
    devices: int
    dollars_per_hour: float | None
    source: str
    problem: str

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """What a million tokens of answers cost at the load."""
        if self.plan is None or self.dollars_per_hour is None:
            return None
        return self.dollars_per_hour / (self.plan.traffic.mean_rate * self.plan.traffic.mean_out * 3600) * 1e6

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "cluster": self.cluster.name,
            "devices": self.devices,
            "dollars_per_hour": self.dollars_per_hour,
            "dollars_per_million_tokens": self.dollars_per_million_tokens,
            "price_source": self.source,
            "plan": None if self.plan is None else self.plan.to_json(),
            "problem": self.problem,
        }


@dataclass(frozen=True)
class ServingOffers(Printed):
    """Clusters for a load, the cheapest first; print it."""

    offers: tuple[ServingOffer, ...]
    traffic: Traffic
    slo: Slo

    @property
    def best(self) -> ServingOffer | None:
        """The cheapest that carries the load; None where none does."""
        return next((one for one in self.offers if one.plan is not None), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"rate": self.traffic.mean_rate, "offers": [one.to_json() for one in self.offers]}

    def __rich__(self) -> RenderableType:
        table = Table(title=f"machines for {self.traffic}; {self.slo}", title_justify="left")
        for name in ("cluster", "devices", "arrangement", "$/h", "$ for 1M tokens"):
            table.add_column(name, justify="left" if name in ("cluster", "arrangement") else "right")
        for one in self.offers:
            price, tokens = one.dollars_per_hour, one.dollars_per_million_tokens
            money = ["unknown" if value is None else f"{value:,.3g}" for value in (price, tokens)]
            cells = [str(one.devices), str(one.plan.chosen)] if one.plan else ["", "none"]
            table.add_row(one.cluster.name, *cells, *(money if one.plan else ("", "")))
        problems = [Text(f"{one.cluster.name}: {one.problem}") for one in self.offers if one.problem]
        sources = dict.fromkeys(one.source for one in self.offers if one.source)
        prices = [Text("prices: " + "; ".join(sources))] if sources else []
        return Group(table, *prices, *problems)


def explore_serving(
    model: Any,
    traffic: Traffic,
    slo: Slo | None = None,
    clusters: Sequence[Cluster | str] = USUAL,
    prices: Mapping[str, float] | None = None,
    **options: Any,
) -> ServingOffers:
    """Plans a model on every cluster for the least cost of a load; the other arguments are those of `plan_serving`."""
    if not clusters or isinstance(clusters, str):
        raise ServingError(f"clusters is {clusters!r}; give a list such as ['1x8 h100', '1x8 a100-80gb']")
    machines = [find_cluster(one) for one in clusters]
    with progress():  # one line for all of the plans
        found = [_offer(model, one, traffic, slo, prices or {}, options) for one in machines]
    known = [one.dollars_per_hour for one in found]
    ranks = [(one.plan is None, inf if price is None else price) for one, price in zip(found, known, strict=True)]
    order = sorted(range(len(found)), key=lambda place: (*ranks[place], found[place].devices))
    return ServingOffers(tuple(found[place] for place in order), traffic, slo or Slo())


def _offer(
    model: Any, machines: Cluster, traffic: Traffic, slo: Slo | None, prices: Mapping[str, float], options: Any
) -> ServingOffer:
    try:
        plan = plan_serving(model, machines, traffic, slo, objective="cost", prices=prices, **options)
    except DoesNotFit as error:
        return ServingOffer(machines, None, 0, None, "", str(error))
    except ServingError as error:
        if "keeps the promise" not in str(error):  # what is wrong on every cluster
            raise
        return ServingOffer(machines, None, 0, None, "", str(error))
    times = 1 if plan.enough else ceil(traffic.mean_rate / plan.goodput)
    devices = times * plan.num_devices
    price = cluster_price(machines, prices)
    dollars = price.dollars / machines.num_devices * devices if price else None
    return ServingOffer(machines, plan, devices, dollars, price.source if price else "", "")
