"""`mw.place_models`: several models on one cluster, so that devices which one model leaves idle serve another's burst.

Devices are cut into equal groups, and each group holds parts of several models, which take turns step by step. Larger
groups split each model over more devices and hold more models each, in the same memory: a burst for one model then
finds all their devices, at the price of collectives in every step (AlpaServe, arXiv:2302.11665). The smallest groups
that hold a model are plain replication, in which each device is one model's, or a few models' as a whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Printed, Table
from meshwright.errors import DoesNotFit, ServingError
from meshwright.hardware import Cluster
from meshwright.profiler import cluster as find_cluster
from meshwright.serving.planning.decoder_work import decoder_work
from meshwright.serving.planning.engine_constants import find_engine
from meshwright.serving.planning.prices import StepPrices
from meshwright.serving.planning.promise import Slo
from meshwright.serving.planning.split import USABLE, Degrees, Storage, cache_bytes_per_token, weight_bytes
from meshwright.serving.planning.traffic import Traffic
from meshwright.serving.scheduling import Limits
from meshwright.serving.simulation.outcome import Outcome
from meshwright.serving.simulation.replica import Replica
from meshwright.serving.simulation.simulate import Simulation

COLUMNS = ("groups", "models on each", "requests/s")
#: Requests of a simulation, and halvings of the interval in which the goodput lies.
_REQUESTS, _HALVINGS = 600, 5
#: Doublings and halvings of the loads as given between which the goodput is looked for.
_POWERS = 10
#: Sequences of one model in a step, tokens of a block, and requests that may wait.
_SLOTS, _BLOCK, _QUEUE = 256, 16, 100_000


@dataclass(frozen=True)
class SharedGroup:
    """Devices that hold parts of several models, which take turns.

    Attributes:
        split: How each model is spread over them.
        models: Which models.
    """

    split: Degrees
    models: tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """Groups of devices and the models on them, with what they carry.

    Attributes:
        groups: The groups.
        scale: Times the loads as given that they carry under the promise.
    """

    groups: tuple[SharedGroup, ...]
    scale: float

    @property
    def size(self) -> int:
        """Devices of a group."""
        return self.groups[0].split.num_devices


@dataclass(frozen=True)
class JointPlan(Printed):
    """Several models on one cluster; print it.

    Attributes:
        cluster: The machines.
        loads: The load of each model.
        slo: The promise, of requests of all models together.
        chosen: The placement.
        plain: The best placement without splitting models further than they must be: plain replication.
        others: Placements in groups of other sizes.
        prices: What steps of each model take.
    """

    cluster: Cluster
    loads: Mapping[str, Traffic]
    slo: Slo
    chosen: Placement
    plain: Placement
    others: tuple[Placement, ...]
    prices: Mapping[str, StepPrices] = field(repr=False)

    @property
    def rate(self) -> float:
        """Requests a second of all models together, as given."""
        return sum(load.mean_rate for load in self.loads.values())

    @property
    def goodput(self) -> float:
        """Requests a second that the placement carries, of all models in the given proportion."""
        return self.rate * self.chosen.scale

    @property
    def gain(self) -> float:
        """Goodput relative to that of plain replication."""
        return self.chosen.scale / self.plain.scale if self.plain.scale else float("inf")

    def simulate(self, scale: float | None = None) -> Outcome:
        """Simulates the loads as given, times a number: by default as much as the placement carries."""
        times = self.chosen.scale if scale is None else scale
        loads = {name: load.at(load.mean_rate * times) for name, load in self.loads.items()}
        return simulate_placement(self.chosen.groups, self.prices, loads, self.slo)

    def report(self, path: str | Path, outcome: Outcome | None = None) -> None:
        """Writes a web page about what `simulate` returned: latencies as distributions, devices, and a timeline."""
        from meshwright.serving.simulation.page import About, write_page

        facts = {"goodput": f"{self.goodput:.3g} requests/s", "over plain replication": f"{self.gain:.1f}×"}
        said = [f"Group {n}, {group.split}: {', '.join(group.models)}." for n, group in enumerate(self.chosen.groups)]
        rows = [[words, str(held), f"{rate:.3g}"] for _, words, held, rate in self._placements()]
        about = About(f"{len(self.loads)} models on {self.cluster.name}", facts, said, COLUMNS, rows)
        write_page(path, outcome or self.simulate(), about)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "cluster": self.cluster.name,
            "goodput": self.goodput,
            "plain_goodput": self.rate * self.plain.scale,
            "groups": [{"tensor": g.split.tensor, "models": list(g.models)} for g in self.chosen.groups],
        }

    def __rich__(self) -> RenderableType:
        title = f"{len(self.loads)} models on {self.cluster.name}: {self.goodput:.3g} requests/s, {self.slo}"
        table = Table(title=title, title_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="left" if name == "groups" else "right")
        for mark, words, held, rate in self._placements():
            table.add_row(mark + words, str(held), f"{rate:.3g}")
        names = [Text(f"group {n}: {', '.join(group.models)}") for n, group in enumerate(self.chosen.groups)]
        return Group(table, *names, Text(f"{self.gain:.1f}× the load of plain replication"))

    def _placements(self) -> Iterator[tuple[str, str, int, float]]:
        """A mark for the chosen one, what it is, the most models of a group, and what it carries; the best first."""
        for one in sorted({self.chosen, self.plain, *self.others}, key=lambda one: -one.scale):
            mark, kind = "→ " if one == self.chosen else "  ", " (plain replication)" if one == self.plain else ""
            words = f"{len(one.groups)} × {one.size} device{'s' if one.size > 1 else ''}{kind}"
            yield mark, words, max(len(group.models) for group in one.groups), self.rate * one.scale


def place_models(
    loads: Mapping[str, Traffic],
    cluster: Cluster | str,
    slo: Slo | None = None,
    *,
    weights: str = "bfloat16",
    engine: str = "meshwright",
) -> JointPlan:
    """Places several models on one cluster, so that bursts of one find the devices of others.

    Args:
        loads: The load of each model, by its name as `mw.plan_serving` takes it. A name that ends in ``#2`` and the
            like is another model of the same shape.
        cluster: The machines, as `mw.cluster` takes them.
        slo: The promise, which requests of all models together keep.
        weights: The type of the weights.
        engine: The kind of engine whose overheads are counted.

    Returns:
        The plan; print it.

    Raises:
        DoesNotFit: The cluster does not hold all models.
        ServingError: No placement keeps the promise.

    Examples:
        >>> import meshwright as mw
        >>> bursts = [mw.Traffic(rate=1, tokens_in=256, tokens_out=8, burstiness=4, seed=seed) for seed in range(2)]
        >>> loads = {"llama3-8b#1": bursts[0], "llama3-8b#2": bursts[1]}
        >>> plan = mw.place_models(loads, "1x2 a100-40gb", mw.Slo(ttft_s=0.3))
        >>> plan.gain >= 1
        True
    """
    machines = find_cluster(cluster)
    if not isinstance(loads, Mapping) or not loads or not all(isinstance(one, Traffic) for one in loads.values()):
        raise ServingError(f"loads is {loads!r:.80}; give a mw.Traffic for each model, such as {{'llama3-8b': …}}")
    if machines.mixed:
        raise ServingError(f"cluster {machines.name!r} has hosts of several kinds; place models on each kind by itself")
    slo = slo or Slo()
    prices = {name: _prices(name, machines, weights, engine) for name in loads}
    placed = []
    for size in (n for n in range(1, machines.num_devices + 1) if machines.num_devices % n == 0):
        groups = _assigned(prices, loads, machines, size)
        if groups:
            placed.append(Placement(groups, _scale(groups, prices, loads, slo)))
    if not placed:
        needed = sum(weight_bytes(one.work, one.split, one.storage) for one in prices.values())
        raise DoesNotFit(
            f"{len(loads)} models do not fit on {machines.name} together: their weights take {needed / 1e9:,.0f} GB of "
            f"{machines.num_devices * machines.memory_bytes / 1e9:,.0f}; take more devices or weights='float8'",
            needed_bytes=round(needed / machines.num_devices),
            limit_bytes=machines.memory_bytes,
        )
    chosen = max(placed, key=lambda one: one.scale)
    if not chosen.scale:
        raise ServingError(
            f"no placement on {machines.name} keeps the promise ({slo}), however small the load; loosen it"
        )
    return JointPlan(machines, dict(loads), slo, chosen, placed[0], tuple(placed[1:]), prices)


def simulate_placement(
    groups: Sequence[SharedGroup], prices: Mapping[str, StepPrices], loads: Mapping[str, Traffic], slo: Slo
) -> Outcome:
    """Lets the requests of all models arrive at their groups."""
    replicas = []
    for number, group in enumerate(groups):
        for name in group.models:
            one = prices[name]
            here = StepPrices(one.work, one.cluster, group.split, one.storage, one.engine)
            replicas.append(Replica(here, _limits(group, prices, here), "both", number, name, number))
    total = sum(load.mean_rate for load in loads.values())
    streams = [
        [(arrival, name) for arrival in load.arrivals(max(20, round(_REQUESTS * load.mean_rate / total)))]
        for name, load in loads.items()
    ]
    arrivals = list(merge(*streams, key=lambda pair: pair[0].at_s))
    return Simulation(replicas, slo).serve([a for a, _ in arrivals], models=[name for _, name in arrivals])


def _prices(name: str, machines: Cluster, weights: str, engine: str) -> StepPrices:
    work = decoder_work(name.partition("#")[0])
    return StepPrices(work, machines, Degrees(), Storage(weights), find_engine(engine))


def _assigned(
    prices: Mapping[str, StepPrices], loads: Mapping[str, Traffic], machines: Cluster, size: int
) -> tuple[SharedGroup, ...] | None:
    """Models on groups of a size: each on the least loaded group that has room, then again wherever there is room.

    None where one of them has no room, or cannot be split so.
    """
    split = Degrees(tensor=size)
    if size > machines.devices_per_host or any(split.problem(one.work) for one in prices.values()):
        return None
    usable = machines.memory_bytes * USABLE
    held: list[list[str]] = [[] for _ in range(machines.num_devices // size)]
    left, busy = [usable] * len(held), [0.0] * len(held)

    def needs(name: str) -> float:
        """Bytes of a device for weights and the caches of two of the longest requests."""
        one = prices[name]
        cache = 2 * loads[name].longest * cache_bytes_per_token(one.work, split, one.storage)
        return weight_bytes(one.work, split, one.storage) + cache

    work = {name: one.work.flops_per_token * loads[name].mean_rate for name, one in prices.items()}
    by_size = sorted(prices, key=lambda name: (-needs(name), name))
    for again in (False, True):
        for name in by_size:
            room = [g for g in range(len(held)) if name not in held[g] and left[g] >= needs(name)]
            if not room and not again:
                return None
            for group in [min(room, key=lambda g: (busy[g], -left[g], g))] if room else []:
                held[group].append(name)
                left[group] -= needs(name)
                busy[group] += work[name]
    return tuple(SharedGroup(split, tuple(sorted(models))) for models in held)


def _limits(group: SharedGroup, prices: Mapping[str, StepPrices], one: StepPrices) -> Limits:
    """What one model's requests may use on a group: an even part of what the weights leave of its memory."""
    held = [prices[name] for name in group.models]
    weights = sum(weight_bytes(other.work, group.split, other.storage) for other in held)
    left = (one.cluster.memory_bytes * USABLE - weights) / len(held)
    blocks = int(left / cache_bytes_per_token(one.work, group.split, one.storage)) // _BLOCK
    chunk = one.engine.chunk
    return Limits(_SLOTS, _BLOCK, blocks, chunk, chunk + _SLOTS, _QUEUE, blocks * _BLOCK)


def _scale(
    groups: Sequence[SharedGroup], prices: Mapping[str, StepPrices], loads: Mapping[str, Traffic], slo: Slo
) -> float:
    """Times the loads that the groups carry under the promise; 0 where it is broken by the least."""

    def keeps(scale: float) -> bool:
        scaled = {name: load.at(load.mean_rate * scale) for name, load in loads.items()}
        return simulate_placement(groups, prices, scaled, slo).keeps_promise

    low, high = 0.0, 0.0
    if keeps(1.0):
        low = next((2.0**power for power in range(1, _POWERS) if not keeps(2.0**power)), 2.0**_POWERS) / 2
        high = 2 * low
    else:
        low = next((2.0**-power for power in range(1, _POWERS) if keeps(2.0**-power)), 0.0)
        high = 2 * low
    for _ in range(_HALVINGS if low else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
