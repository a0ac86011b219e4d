"""`mw.plan_serving`: which replicas of a model on which devices keep a promise under the most load, or most cheaply.

Every way to place one replica is assessed in closed form (`candidates.py`); the best few, with prompts and answers
together and apart, are simulated under rising load until they break the promise. The work is the same on every machine,
and so is the answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import ceil
from typing import Any

from meshwright.errors import DoesNotFit, ServingError
from meshwright.exploration.rental_prices import cluster_price
from meshwright.hardware import Cluster
from meshwright.profiler import cluster as find_cluster
from meshwright.progress import Say, progress
from meshwright.serving.planning.candidates import Candidate, assess, candidates, degrees
from meshwright.serving.planning.decoder_work import DecoderWork, decoder_work
from meshwright.serving.planning.engine_constants import find_engine
from meshwright.serving.planning.prices import StepPrices
from meshwright.serving.planning.promise import Slo
from meshwright.serving.planning.serving_plan import Arrangement, Replicas, ServingPlan
from meshwright.serving.planning.split import BYTES, Storage, weight_bytes
from meshwright.serving.planning.traffic import Traffic
from meshwright.units import format_bytes

OBJECTIVES = ("goodput", "cost")
#: Arrangements of each kind, together and apart, that are simulated for their bounds.
_SIMULATED = 2
#: Requests of a simulation: so many for each running sequence, within bounds, so that the promise's percentile is seen.
_FOR_EACH, _FEWEST, _MOST = 2, 200, 600
#: They come over so many times the promised time to the first token, or else a queue that grows would not be seen; in
#: so many requests at most.
_PATIENCE, _LONGEST = 5, 2000
#: The first part of a simulation, in which the replicas fill, is not looked at.
_FILLING = 0.2
#: Part of its goodput for which no replicas are cut into stages that need not be: it is within what simulations tell.
_PLAINER = 0.03
#: Halvings of the interval in which the goodput lies.
_HALVINGS = 4


def plan_serving(
    model: Any,
    cluster: Cluster | str,
    traffic: Traffic,
    slo: Slo | None = None,
    *,
    objective: str = "goodput",
    weights: str = "bfloat16",
    cache: str | None = "bfloat16",
    apart: bool | None = None,
    engine: str = "meshwright",
    prices: Mapping[str, float] | None = None,
) -> ServingPlan:
    """Plans how to serve a language model on a cluster.

    Args:
        model: A name of the zoo such as ``"llama3-8b"``, the folder of a checkpoint of Hugging Face, or a config.
        cluster: The machines, as `mw.cluster` takes them.
        traffic: The load.
        slo: The promise; None for no limits, which asks for the most throughput.
        objective: ``"goodput"`` for the most requests a second under the promise, or ``"cost"`` for the fewest devices
            that carry the load.
        weights: The type of the weights: ``"bfloat16"``, ``"float8"``, ``"int8"``, ``"int4"`` or ``"float4"``.
        cache: The type of keys and values; None for whichever serves more.
        apart: Whether prompts and answers are computed on devices of their own; None for whichever serves more.
        engine: The kind of engine whose overheads are counted.
        prices: Dollars for one device and hour by name of the chip, instead of the package's own.

    Returns:
        The plan; print it, or ask it for `.why`, `.alternatives` or `.simulate()`.

    Raises:
        DoesNotFit: No replica fits into the memory of the devices.
        ServingError: No arrangement keeps the promise; the message says which one could.

    Examples:
        >>> import meshwright as mw
        >>> chat = mw.Traffic(rate=4, tokens_in=500, tokens_out=60)
        >>> plan = mw.plan_serving("llama3-8b", "1x2 h200", chat, mw.Slo(ttft_s=0.5, tpot_s=0.03))
        >>> plan.enough, 0 < plan.goodput < plan.bound
        (True, True)
    """
    machines = find_cluster(cluster)
    _check(machines, traffic, slo, objective)
    slo, work = slo or Slo(), decoder_work(model)
    constants = find_engine(engine)
    # Of the two types of 8 bits this package's engine keeps the nearer one; the others have kernels for `float8` alone.
    caches = (cache,) if cache else ("bfloat16", "int8" if constants.traced else "float8")
    storages = tuple(Storage(weights, one, scaled=constants.traced) for one in caches)
    longest = traffic.longest
    if work.most_positions and longest > work.most_positions:
        raise ServingError(f"{work.name} has {work.most_positions} positions, and the longest request {longest} tokens")
    with progress() as say:
        say(f"pricing the ways to serve {work.name} on {machines.name}")
        placed = candidates(work, machines, storages, constants)
        kinds = {
            role: [kind for one in placed if (kind := assess(one, traffic, slo, role, longest)) is not None]
            for role in ("both", "prefill", "decode")
        }
        if not any(one.room >= longest for one in placed):
            raise _does_not_fit(work, machines, storages, longest)
        tried = _arrangements(kinds, machines.num_devices, slo, longest, apart)
        bound = max((one.bound for one in tried), default=0.0)
        finalists = _finalists(tried, objective, traffic.mean_rate)
        kept = _simulated(finalists, traffic, slo, say)
    if not kept:
        raise _not_kept(work, machines, placed, traffic, slo)
    ranked = sorted(kept, key=lambda one: _rank(one, objective, traffic.mean_rate))
    chosen = ranked[0]
    price = cluster_price(machines, prices or {})
    dollars = price.dollars * chosen.num_devices / machines.num_devices if price else None
    others = tuple(ranked[1:])
    return ServingPlan(work.name, machines, traffic, slo, chosen, others, bound, objective, dollars)


def _check(machines: Cluster, traffic: Traffic, slo: Slo | None, objective: str) -> None:
    if machines.mixed:
        raise ServingError(f"cluster {machines.name!r} has hosts of several kinds; plan for each kind by itself")
    if not isinstance(traffic, Traffic):
        raise ServingError(f"traffic is {traffic!r:.60}; give mw.Traffic(rate=20, tokens_in=1000, tokens_out=300)")
    if slo is not None and not isinstance(slo, Slo):
        raise ServingError(f"slo is {slo!r:.60}; give mw.Slo(ttft_s=0.5, tpot_s=0.03)")
    if objective not in OBJECTIVES:
        raise ServingError(f"objective is {objective!r}; choose one of {', '.join(OBJECTIVES)}")


def _arrangements(
    kinds: Mapping[str, Sequence[Candidate]], devices: int, slo: Slo, longest: int, apart: bool | None
) -> list[Arrangement]:
    """What fills the devices best: as many replicas as there is room for, or as many for prompts as answers need."""
    found = []
    quick = {role: [k for k in group if slo.ttft_s is None or k.first_s <= slo.ttft_s] for role, group in kinds.items()}
    if apart is not True:
        found += [_arranged([(kind, devices // kind.num_devices)], longest) for kind in quick["both"]]
    if apart is not False:
        fronts, backs = _best_of_each_size(quick["prefill"]), _best_of_each_size(kinds["decode"])
        found += [_parted(front, back, devices, longest) for front, back in product(fronts, backs)]
    return [one for one in found if one is not None]


def _best_of_each_size(kinds: Sequence[Candidate]) -> list[Candidate]:
    """The replicas that carry the most per device, a few of each number of devices."""
    best: dict[int, list[Candidate]] = {}
    for kind in sorted(kinds, key=lambda kind: -kind.rate_per_device):
        best.setdefault(kind.num_devices, []).append(kind)
    return [kind for alike in best.values() for kind in alike[:_SIMULATED]]


def _arranged(counts: Sequence[tuple[Candidate, int]], longest: int) -> Arrangement | None:
    if any(count < 1 for _, count in counts):
        return None
    groups = tuple(Replicas(kind, n, kind.limits(longest, kind.prices.engine.chunk)) for kind, n in counts)
    return Arrangement(groups, 0.0, min(kind.rate * n for kind, n in counts))


def _parted(front: Candidate, back: Candidate, devices: int, longest: int) -> Arrangement | None:
    """So many replicas for prompts and for answers that together they carry the most."""
    best = None
    for fronts in range(1, devices // front.num_devices + 1):
        backs = (devices - fronts * front.num_devices) // back.num_devices
        one = _arranged([(front, fronts), (back, backs)], longest)
        if one is not None and (best is None or one.bound > best.bound):
            best = one
    return best


def _finalists(tried: Sequence[Arrangement], objective: str, rate: float) -> list[Arrangement]:
    """The few that are worth a simulation, together and apart: the best by bound, and of other tensor degrees."""
    found: list[Arrangement] = []
    for apart in (False, True):
        alike = [one if objective == "goodput" else _fewest(one, rate) for one in tried if one.apart == apart]
        alike.sort(key=lambda one: _rank(replace(one, goodput=one.bound), objective, rate))
        best_of_degree = list({_tensors(one): one for one in reversed(alike)}.values())[::-1]
        best = alike[:_SIMULATED]
        found += best + [one for one in best_of_degree if one not in best][: _SIMULATED - 1]
    return found


def _tensors(one: Arrangement) -> tuple[int, ...]:
    """The tensor degrees of an arrangement: what is alike in these meets with much the same latencies."""
    return tuple(group.kind.prices.split.tensor for group in one.groups)


def _fewest(one: Arrangement, rate: float) -> Arrangement:
    """Only so many replicas as a load needs with a little room, which bursts take."""
    spare = 1.25
    groups = tuple(
        replace(group, count=min(group.count, max(1, ceil(rate * spare / group.kind.rate)))) for group in one.groups
    )
    return Arrangement(groups, 0.0, min(group.kind.rate * group.count for group in groups))


def _rank(one: Arrangement, objective: str, rate: float) -> tuple[bool, float, float]:
    """What sorts first is better: the most goodput; or, of those that carry the load, the fewest devices."""
    plain = one.goodput * (1 - _PLAINER * one.num_pipelines)
    if objective == "goodput":
        return False, -plain, one.num_devices
    enough = one.goodput >= rate
    return not enough, one.num_devices if enough else -plain, -plain


def _simulated(finalists: Sequence[Arrangement], traffic: Traffic, slo: Slo, say: Say) -> list[Arrangement]:
    """What each finalist carries; those that carry no more per device than the best of their kind so far are left out.

    A finalist whose bound is lower, or that breaks the promise under that load, needs no more simulations.
    """
    kept: list[Arrangement] = []
    for number, one in enumerate(finalists, 1):
        say(f"simulating under rising load {number} of {len(finalists)}: {one}")
        alike = [other for other in kept if other.apart == one.apart]
        beaten = max((other.goodput / other.num_devices for other in alike), default=0.0) * one.num_devices
        if one.bound > beaten and (not beaten or keeps(one, traffic.at(beaten), slo)):
            carried = goodput(one, traffic, slo, beaten)
            if carried:
                kept.append(replace(one, goodput=carried))
    return kept


def keeps(one: Arrangement, traffic: Traffic, slo: Slo) -> bool:
    """Whether an arrangement keeps a promise under a load, once its replicas have filled."""
    times, groups = one.unit
    running = sum(group.count * group.limits.slots for group in groups if group.kind.role != "prefill")
    patience = _PATIENCE * (slo.ttft_s or 0.0) * traffic.mean_rate / times
    requests = max(min(max(_FEWEST, _FOR_EACH * running), _MOST), min(round(patience), _LONGEST))
    outcome = one.serve(traffic, slo, requests, units=True)
    settled = outcome.requests[int(len(outcome.requests) * _FILLING) :]
    kept = sum(slo.kept_by(request.ttft_s, request.tpot_s) for request in settled)
    return kept >= slo.percentile * len(settled)


def goodput(one: Arrangement, traffic: Traffic, slo: Slo, low: float = 0.0) -> float:
    """Requests a second under which an arrangement keeps a promise, found by halving between what does and does not.

    Args:
        one: The arrangement.
        traffic: The load, whose rate is not looked at.
        slo: The promise.
        low: A rate under which it is known to keep it.
    """
    high = one.bound
    for share in (0.7, 0.35, 0.1, 0.02) if not low else ():
        if keeps(one, traffic.at(share * one.bound), slo):
            low = share * one.bound
            break
        high = share * one.bound
    for _ in range(_HALVINGS if low else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(one, traffic.at(middle), slo) else (low, middle)
    return low


def _does_not_fit(work: DecoderWork, machines: Cluster, storages: Sequence[Storage], longest: int) -> DoesNotFit:
    """What one device would need, and what would make it fit."""
    options = [weight_bytes(work, spread, storage) for spread in degrees(work, machines) for storage in storages]
    needed, whole = min(options), weight_bytes(work, type(next(degrees(work, machines)))(), storages[0])
    smaller = [name for name in ("float8", "int4") if BYTES[name] < BYTES[storages[0].weights]]
    devices = ceil(whole / (machines.memory_bytes * 0.7))
    advice = f"take about {devices} devices" + (f", or weights={smaller[0]!r}" if smaller else "")
    message = (
        f"{work.name} fits nowhere on {machines.name}: its weights in {storages[0].weights} take "
        f"{format_bytes(needed)} of a device at the least, and a request of {longest:,} tokens must fit beside them; "
        f"a device has {format_bytes(machines.memory_bytes)}; {advice}"
    )
    return DoesNotFit(message, needed_bytes=round(needed), limit_bytes=machines.memory_bytes)


def _not_kept(
    work: DecoderWork, machines: Cluster, placed: Sequence[StepPrices], traffic: Traffic, slo: Slo
) -> ServingError:
    """What the quickest replica would do, by which a promise can be chosen."""
    open_slo, longest = Slo(), traffic.longest
    alone = [one for one in placed if one.room >= longest]
    fits = [kind for one in alone if (kind := assess(one, traffic, open_slo, "both", longest)) is not None]
    first = min(fits, key=lambda kind: kind.first_s)
    token = min(fits, key=lambda kind: kind.prices.decode_s(1, traffic.mean_in))
    token_s = token.prices.decode_s(1, traffic.mean_in)
    return ServingError(
        f"nothing on {machines.name} keeps the promise for {work.name} ({slo}): alone, a first token takes at least "
        f"{first.first_s * 1e3:.3g} ms ({first.prices.split}) and each later one {token_s * 1e3:.3g} ms "
        f"({token.prices.split}); promise a few times that, or take faster chips, smaller weights or shorter prompts"
    )
