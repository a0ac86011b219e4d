"""Limits that keep a promise: how many sequences, and how much of a prompt beside them, a step has time for."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshwright.errors import ServingError
from meshwright.hardware import Cluster
from meshwright.serving.engine.buckets import LEAST_TOKENS
from meshwright.serving.planning.decoder_work import decoder_work
from meshwright.serving.planning.engine_constants import find_engine
from meshwright.serving.planning.prices import StepPrices
from meshwright.serving.planning.promise import Slo
from meshwright.serving.planning.split import Degrees, Storage
from meshwright.serving.scheduling import Limits
from meshwright.serving.sizes import Sizes
from meshwright.units import format_seconds


def step_prices(
    config: Any,
    machines: Cluster,
    devices: int,
    stages: int = 1,
    cache: str | None = None,
    split: Degrees | None = None,
) -> StepPrices:
    """What steps of a model cost on so many devices a stage: as a plan splits them, or else by tensor parallelism."""
    work, storage = decoder_work(config), Storage(config.dtype, cache or config.dtype, scaled=True)
    if split is None:
        split = Degrees(tensor=devices, pipeline=stages)
        split = Degrees(pipeline=stages) if split.problem(work) else split
    return StepPrices(work, machines, split, storage, find_engine("meshwright"))


def keeping(slo: Slo, prices: StepPrices, limits: Limits, sizes: Sizes) -> Sizes:
    """Sizes with which every step keeps a promise, even one that computes a chunk of a prompt beside all sequences.

    First come as many sequences as there is time for, then as long a chunk; what a user gave stays as it is.

    Args:
        slo: The promise.
        prices: What steps cost.
        limits: What the memory allows.
        sizes: What was asked for.

    Raises:
        ServingError: One sequence alone takes longer.
    """
    context = limits.max_len // 2

    def kept(slots: int, chunk: int) -> bool:
        return _seconds(prices, slots, chunk, context) <= (slo.tpot_s or float("inf")) and (
            slo.ttft_s is None or prices.engine.request_s + _seconds(prices, slots, chunk, context) <= slo.ttft_s
        )

    least = sizes.chunk or min(LEAST_TOKENS, limits.chunk)
    slots = next((count for count in _halvings(sizes.slots, limits.slots) if kept(count, least)), None)
    if slots is None:
        fewest = sizes.slots or 1
        raise ServingError(
            f"a step of {fewest} sequences with {least} tokens of a prompt takes "
            f"{format_seconds(_seconds(prices, fewest, least, context))} by the cost model, longer than slo promises "
            f"({slo}); promise less, or use more or faster devices"
        )
    chunk = next(count for count in _halvings(sizes.chunk, limits.chunk) if kept(slots, count) or count <= least)
    return replace(sizes, slots=slots, chunk=max(chunk, least))


def _halvings(given: int | None, most: int) -> Iterator[int]:
    """What was given, or ever less from the most on."""
    if given is not None:
        yield given
        return
    while most:
        yield most
        most //= 2


def _seconds(prices: StepPrices, slots: int, chunk: int, context: int) -> float:
    """A step that computes a chunk beside all sequences, each with a context of so many tokens."""
    return prices.step_s(slots + chunk, slots + 1, slots * context, chunk * (context + chunk / 2))
