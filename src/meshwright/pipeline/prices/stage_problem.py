"""The problem of a stage by itself: its own layers, its own microbatches, its own memory.

A solve of the whole model on a view splits every layer as is best for all of them. A stage may want something else:
its layers are some of them, what it does once a step counts the less the more microbatches there are, what it computes
again counts twice, what its replicas exchange goes by the bytes of its parameters, and its memory may be short. All of
these are weights of the same problem. The stage's split is the choice with the least

    Σ w · seconds + exchange_s ÷ microbatches · parameter bytes + byte_s · (state + in flight × activations)

where ``w`` says how often something is in the stage (`steady.Weights`), and ``byte_s`` what memory is worth, which
`refine` finds. Layers of other stages count a little, so that they are split sensibly, too: the choice is one for the
whole model, priced by layer like any other, and any stage may have it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshwright.errors import ShardingError
from meshwright.hardware import Mesh
from meshwright.pipeline.layers.forward_pass import Array, Ints
from meshwright.pipeline.layers.layers import Layers
from meshwright.pipeline.prices.layer_prices import LayerPrices
from meshwright.pipeline.prices.layer_pricing import Pricing
from meshwright.pipeline.prices.microbatch_weights import steady_weights, weighed
from meshwright.planner.grouping.numbering import pack
from meshwright.planner.methods import Auto
from meshwright.planner.pricing.formulation import Formulation
from meshwright.priced.problem import Usage, choice_problem
from meshwright.solver import ChoiceProblem

_OTHERS = 1e-4  # what layers of other stages count


class Dearness(NamedTuple):
    """What a stage's memory is worth to it.

    Attributes:
        byte_s: Seconds of a microbatch that a byte is worth.
        in_flight: Microbatches in flight; of an interleaved stage, as parts of all its layers.
        spread: Over how many replicas the optimizer's state, gradients and parameters are spread.
    """

    byte_s: float
    in_flight: float
    spread: tuple[int, int, int]


class Own(NamedTuple):
    """A stage that is to be split for itself.

    Attributes:
        chunks: Its layers; None for all of them.
        num_microbatches: How many there are.
        checkpoint: What is computed again.
        exchange_s: Seconds per byte of a parameter in which replicas exchange gradients or parameters, once a step.
        memory: What its memory is worth to it; None where that does not bind.
    """

    chunks: tuple[tuple[int, int], ...] | None
    num_microbatches: int
    checkpoint: str = "none"
    exchange_s: float = 0.0
    memory: Dearness | None = None

    def share(self, layers: Layers) -> Array:
        """The share of each unit that is in the stage."""
        end, chunks = layers.first + layers.count, self.chunks or ((0, layers.num_layers),)
        parts = [np.clip(np.minimum(b, end) - np.maximum(a, layers.first), 0, None) for a, b in chunks]
        found: Array = np.sum(parts, axis=0) / layers.count
        return found


def price_own(pricing: Pricing, mesh: Mesh, own: Own) -> LayerPrices | None:
    """The layers' prices under the choice that is best for a stage; None where there is none."""
    try:
        formulation = pricing.formulate(mesh, Auto())
    except ShardingError:
        return None
    return pricing.solve(formulation, own_problem(pricing, formulation, own))


def own_problem(pricing: Pricing, formulation: Formulation, own: Own) -> ChoiceProblem:
    """The choice problem of a stage on a view."""
    share, layers = own.share(pricing.layers), pricing.layers
    counted = np.where(share > 0, share, _OTHERS)
    often = counted[layers.places.unit] * pricing.often(own.checkpoint)
    weights = steady_weights(formulation, pricing.ends, 1 / own.num_microbatches, often)
    costs, edges = weighed(formulation, weights)
    parameters = np.array(pricing.roles.parameters, np.int64)
    rate = own.exchange_s / own.num_microbatches
    for which, size in _by_class(pricing, formulation, parameters, rate * counted[pricing.homes(parameters)]):
        costs[which] = costs[which] + size
    if own.memory is not None:
        for which, size in _held(pricing, formulation, own, own.memory, share):
            costs[which] = costs[which] + own.memory.byte_s * (size - size.min())
    return choice_problem([1.0] * len(costs), costs, edges, Usage(0), {}, None)


def _held(
    pricing: Pricing, formulation: Formulation, own: Own, memory: Dearness, share: Array
) -> Iterator[tuple[int, Array]]:
    """Bytes of the stage's state and of the activations in flight: by class, for each strategy."""
    moments, gradients, weights = (1 / parts for parts in memory.spread)
    roles, trains = pricing.roles, pricing.trains
    for values, times in (
        (roles.parameters, weights + trains * gradients),
        (roles.optimizer, moments),
        (pricing.copies, weights),
    ):
        some = np.array(values, np.int64)
        yield from _by_class(pricing, formulation, some, times * share[pricing.homes(some)])
    held, parts = pricing.kept(own.checkpoint, own.chunks or ((0, pricing.layers.num_layers),), share)
    yield from _by_class(pricing, formulation, held, memory.in_flight * parts)


def _by_class(pricing: Pricing, formulation: Formulation, values: Ints, times: Array) -> Iterator[tuple[int, Array]]:
    """Bytes of some values on one device, so many times each: summed up by class, for each strategy."""
    grouping = pricing.grouping
    counted = (grouping.placed.home[values] >= 0) & (times > 0)
    values, times = values[counted], times[counted]
    if not len(values):
        return
    which = np.array(formulation.folded.group_class, np.int64)[grouping.placed.home[values]]
    place = grouping.values.rank[values]
    _, first, column = np.unique(pack(which, place), return_index=True, return_inverse=True)
    sizes = np.bincount(column, times * pricing.flow.num_bytes[values])
    for i, size in zip(first.tolist(), sizes.tolist(), strict=True):
        codes = formulation.tables[which[i]].codes[place[i]]
        yield int(which[i]), size / formulation.axes.num_parts(codes)
