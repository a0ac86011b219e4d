"""Rental prices of devices."""

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

from meshwright.errors import ClusterError
from meshwright.hardware import Cluster, find_chip


class Price(NamedTuple):
    """Dollars for one device and hour, with the source."""

    dollars: float
    source: str


def cluster_price(cluster: Cluster, own: Mapping[str, float]) -> Price | None:
    """Dollars for a whole cluster and hour; None where the price of a chip is not known.

    Args:
        cluster: The cluster.
        own: The user's prices of one device and hour, by name of the chip.
    """
    own = {find_chip(name).name: _checked(name, dollars) for name, dollars in own.items()}
    parts = []
    for group in cluster.groups:
        price = _price(group.chip.name, own)
        if price is None:
            return None
        parts.append((price.dollars * group.num_devices, price.source))
    return Price(sum(dollars for dollars, _ in parts), "; ".join(dict.fromkeys(source for _, source in parts)))


def _checked(name: str, dollars: float) -> float:
    if isinstance(dollars, bool) or not isinstance(dollars, int | float) or not 0 < dollars < float("inf"):
        raise ClusterError(f"the price of {name!r} is {dollars!r}; give dollars for one device and hour, above 0")
    return float(dollars)


def _price(chip: str, own: Mapping[str, float]) -> Price | None:
    if chip in own:
        return Price(own[chip], "given")
    data = _data()
    entry = data["per_hour"].get(chip)
    if entry is None:
        return None
    source = data["sources"][entry["source"]]
    return Price(entry["dollars"], f"{source['what']} ({source['date']})")


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    return tomllib.loads(files("meshwright.simulator").joinpath("prices.toml").read_text(encoding="utf-8"))
