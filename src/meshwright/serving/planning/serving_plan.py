"""A plan to serve a model: which replicas, how each is spread, its batch and cache, and the load that they carry."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import floor, gcd
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Printed, Table
from meshwright.hardware import Cluster
from meshwright.serving.planning.candidates import Candidate
from meshwright.serving.planning.promise import Slo
from meshwright.serving.planning.split import cache_bytes_per_token, weight_bytes
from meshwright.serving.planning.traffic import Traffic
from meshwright.serving.scheduling import Limits
from meshwright.serving.simulation.outcome import Outcome
from meshwright.serving.simulation.replica import Replica
from meshwright.serving.simulation.simulate import Simulation
from meshwright.units import format_bytes

COLUMNS = ("arrangement", "devices", "batch", "cache", "weights", "requests/s")
#: Part of a link's rate at which caches are sent.
_SENDING = 0.8
#: Fixed seconds to send a cache.
_SEND_S = 1e-3


@dataclass(frozen=True)
class Replicas:
    """Equal replicas.

    Attributes:
        kind: What each of them is.
        count: How many.
        limits: What the requests of one share.
    """

    kind: Candidate
    count: int
    limits: Limits

    @property
    def num_devices(self) -> int:
        return self.count * self.kind.num_devices

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        prices = self.kind.prices
        spread, storage = prices.split, prices.storage
        return {
            "role": self.kind.role,
            "replicas": self.count,
            "devices": self.num_devices,
            "degrees": {name: getattr(spread, name) for name in ("tensor", "pipeline", "data", "expert")},
            "weights": storage.weights,
            "cache": storage.cache,
            "cache_tokens": self.kind.room,
            "cache_bytes": round(self.kind.room * cache_bytes_per_token(prices.work, spread, storage)),
            "weight_bytes": round(weight_bytes(prices.work, spread, storage)),
            "batch": self.limits.slots,
            "chunk": self.limits.chunk,
            "limit": self.kind.limit,
        }


@dataclass(frozen=True)
class Arrangement:
    """Replicas that serve together, and what they were found to carry.

    Attributes:
        groups: One kind of replica for everything; or one for prompts and one for answers.
        goodput: Requests a second under the promise, simulated.
        bound: What they would carry if requests came evenly.
    """

    groups: tuple[Replicas, ...]
    goodput: float
    bound: float

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    @property
    def num_pipelines(self) -> int:
        """Kinds of replicas that are cut into stages."""
        return sum(group.kind.prices.split.pipeline > 1 for group in self.groups)

    @property
    def apart(self) -> bool:
        """Whether prompts and answers are computed apart."""
        return len(self.groups) > 1

    @property
    def unit(self) -> tuple[int, tuple[Replicas, ...]]:
        """The smallest part that is like the whole, and how often it is there.

        It has two replicas for each purpose if the whole has several, so that a request finds the less busy one.
        """
        alike = gcd(*(group.count for group in self.groups))
        pairs = next(n for n in range(min(2, alike), alike + 1) if alike % n == 0)
        times = alike // pairs
        return times, tuple(replace(group, count=group.count // times) for group in self.groups)

    def transfer_s(self, tokens: int) -> float:
        """Seconds to send a prompt's cache from where prompts are computed to where answers are."""
        if not self.apart:
            return 0.0
        prices = [group.kind.prices for group in self.groups]
        # Caches are sent in half precision, since the two may be kept in different types.
        slowest = max(cache_bytes_per_token(p.work, p.split, replace(p.storage, cache="bfloat16")) for p in prices)
        cluster = prices[0].cluster
        link = cluster.intra if self.num_devices <= cluster.devices_per_host else cluster.inter
        return _SEND_S + tokens * slowest / (link.bandwidth * _SENDING)

    def serve(self, traffic: Traffic, slo: Slo, requests: int, units: bool = False) -> Outcome:
        """Simulates a load; with `units` only the share of it that comes to the smallest part of the whole.

        That share is drawn, so that it is as uneven as the load: a router that knows how busy replicas are does better.
        """
        times, groups = self.unit if units else (1, self.groups)
        kinds = [group for group in groups for _ in range(group.count)]
        replicas = [Replica(g.kind.prices, g.limits, g.kind.role, n) for n, g in enumerate(kinds)]
        draw = Random(traffic.seed)
        arrivals = [a for a in traffic.arrivals(requests * times) if draw.randrange(times) == 0]
        return Simulation(replicas, slo, self.transfer_s).serve(arrivals)

    def __str__(self) -> str:
        words = []
        for group in self.groups:
            role = {"both": "", "prefill": " for prompts", "decode": " for answers"}[group.kind.role]
            plural = "s" if group.count > 1 else ""
            words.append(f"{group.count} replica{plural}{role}, each {group.kind.prices.split}")
        return "; ".join(words)


@dataclass(frozen=True)
class ServingPlan(Printed):
    """A plan to serve a model under a promise; print it.

    Attributes:
        model: The model's name.
        cluster: The machines.
        traffic: The load.
        slo: The promise.
        chosen: The replicas.
        alternatives: Other arrangements that were simulated, best first.
        bound: Requests a second that no arrangement of the cluster can exceed under the promise, by the same prices.
        objective: ``"goodput"`` or ``"cost"``.
        dollars_per_hour: What the devices that are used cost; None where their price is not known.
    """

    model: str
    cluster: Cluster
    traffic: Traffic
    slo: Slo
    chosen: Arrangement
    alternatives: tuple[Arrangement, ...]
    bound: float
    objective: str
    dollars_per_hour: float | None

    @property
    def goodput(self) -> float:
        """Requests a second that the plan carries under the promise."""
        return self.chosen.goodput

    @property
    def num_devices(self) -> int:
        """Devices that the plan uses."""
        return self.chosen.num_devices

    @property
    def enough(self) -> bool:
        """Whether it carries the load."""
        return self.goodput >= self.traffic.mean_rate

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """What a million tokens of answers cost at the goodput."""
        if self.dollars_per_hour is None or not self.goodput:
            return None
        return self.dollars_per_hour / (self.goodput * self.traffic.mean_out * 3600) * 1e6

    def simulate(self, traffic: Traffic | None = None, requests: int = 1000) -> Outcome:
        """Simulates the plan under its load, or another one."""
        return self.chosen.serve(traffic or self.traffic, self.slo, requests)

    def report(self, path: str | Path, outcome: Outcome | None = None) -> None:
        """Writes a web page about the plan under a load: latencies as distributions, replicas, and a timeline.

        Args:
            path: The page, one file that needs no other.
            outcome: What `simulate` returned; by default its load is the plan's own, or what the plan carries of it.
        """
        from meshwright.serving.simulation.page import About, write_page

        if outcome is None:
            outcome = self.simulate(self.traffic.at(min(self.traffic.mean_rate, self.goodput)))
        facts = {"goodput": f"{self.goodput:.3g} requests/s", "no more than": f"{self.bound:.3g} requests/s"}
        facts["devices"] = str(self.num_devices)
        if self.dollars_per_million_tokens is not None:
            facts["a million tokens of answers"] = f"${self.dollars_per_million_tokens:.3g}"
        rows = [[str(one), *_cells(one)] for one in (self.chosen, *self.alternatives)]
        about = About(
            f"{self.model} on {self.cluster.name}", facts, [f"Load: {self.traffic}.", *self.why], COLUMNS, rows
        )
        write_page(path, outcome, about)

    @cached_property
    def gain_of_parting(self) -> float | None:
        """Goodput per device with prompts and answers apart, relative to the best that computes both together.

        None where one of the two was not found to be possible.
        """
        rates: dict[bool, float] = {}
        for one in (self.chosen, *self.alternatives):
            rates[one.apart] = max(rates.get(one.apart, 0.0), one.goodput / one.num_devices)
        return rates[True] / rates[False] if rates.get(True) and rates.get(False) else None

    @property
    def why(self) -> list[str]:
        """What was decided and what it follows from, a sentence each."""
        said = []
        for group in self.chosen.groups:
            kind, name = group.kind, {"both": "Replicas", "prefill": "Prompts", "decode": "Answers"}[group.kind.role]
            cached = f"{kind.prices.storage.cache} cache of {kind.room:,} tokens beside the weights"
            at_most = f"at most {group.limits.slots} sequences in a batch, limited by {kind.limit}; {cached}"
            said.append(f"{name}: {kind.prices.split}; {at_most}.")
        gain = self.gain_of_parting
        if gain is not None and self.chosen.apart:
            said.append(f"Prompts and answers are computed apart, which carries {gain:.2f}× as much per device.")
        elif gain is not None:
            said.append(f"Prompts and answers are computed together: apart they would carry {gain:.2f}× as much.")
        elif not self.chosen.apart:
            said.append("Prompts and answers are computed together: apart, nothing that was tried keeps the promise.")
        share = self.goodput / self.bound if self.bound else 0.0
        said.append(f"No arrangement carries more than {self.bound:.3g} requests/s; this one {share:.0%} of that.")
        if not self.enough:
            rate, times = self.traffic.mean_rate, self.traffic.mean_rate / self.goodput
            said.append(f"The load of {rate:.4g} requests/s needs {times:.1f} times these machines.")
        return said

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "model": self.model,
            "cluster": self.cluster.name,
            "objective": self.objective,
            "rate": self.traffic.mean_rate,
            "slo": {"ttft_s": self.slo.ttft_s, "tpot_s": self.slo.tpot_s, "percentile": self.slo.percentile},
            "goodput": self.goodput,
            "bound": self.bound,
            "enough": self.enough,
            "devices": self.num_devices,
            "dollars_per_hour": self.dollars_per_hour,
            "dollars_per_million_tokens": self.dollars_per_million_tokens,
            "gain_of_parting": self.gain_of_parting,
            "replicas": [group.to_json() for group in self.chosen.groups],
            "alternatives": [
                {"replicas": [g.to_json() for g in a.groups], "goodput": a.goodput, "devices": a.num_devices}
                for a in self.alternatives
            ],
            "why": self.why,
        }

    def __rich__(self) -> RenderableType:
        title = f"{self.model} on {self.cluster.name}: {self.goodput:.3g} requests/s, {self.slo}"
        table = Table(title=title, title_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="left" if name == "arrangement" else "right")
        for mark, one in (("→ ", self.chosen), *(("  ", other) for other in self.alternatives)):
            table.add_row(mark + str(one), *_cells(one))
        parts: list[RenderableType] = [table, Text(f"load: {self.traffic}"), *map(Text, self.why)]
        if self.dollars_per_hour is not None and self.dollars_per_million_tokens is not None:
            per_million = f"${self.dollars_per_million_tokens:.3g} for a million tokens of answers"
            parts.append(Text(f"price: ${self.dollars_per_hour:,.2f} an hour, {per_million}"))
        return Group(*parts)


def _cells(one: Arrangement) -> list[str]:
    batches = " + ".join(str(group.limits.slots) for group in one.groups)
    sizes = []
    for group in one.groups:
        prices, kind = group.kind.prices, group.kind
        size = kind.room * cache_bytes_per_token(prices.work, prices.split, prices.storage)
        sizes.append((format_bytes(size), format_bytes(weight_bytes(prices.work, prices.split, prices.storage))))
    caches, weights = (" + ".join(dict.fromkeys(column)) for column in zip(*sizes, strict=True))
    rate = f"{one.goodput:.3g}" if one.goodput >= 1 else f"{floor(one.goodput * 1e3) / 1e3:g}"
    return [str(one.num_devices), batches, caches, weights, rate]
