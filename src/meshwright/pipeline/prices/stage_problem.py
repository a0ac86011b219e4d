"""The choice problem of a single stage: its own layers, its own microbatches, its own memory.

A solve of the whole model on a view splits every layer as is best for the whole model. Another split may be better for
one stage: it holds only some of the layers, its once-per-step work counts less the more microbatches there are,
recomputed work counts twice, the exchange between its replicas grows with the bytes of its parameters, and its memory
may be short. All of these are weights of the same problem. The stage's split is the choice with the least

    Σ w · seconds + exchange_s ÷ microbatches · parameter bytes + byte_s · (state + in flight × activations)

where ``w`` counts how often the stage does each piece of work (`microbatch_weights.Weights`), and ``byte_s`` is the
price of memory, which `refine` finds. Layers of other stages get a small weight, so that they too are split sensibly:
the choice covers the whole model, is priced by layer like any other, and may be used by any stage.

A way to use the axes of a view (`price_way`) is such a stage, or one of the names in `WAYS`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshwright.arrays import Floats, Ints
from meshwright.errors import ShardingError
from meshwright.hardware import Mesh
from meshwright.pipeline.layers.layers import Layers
from meshwright.pipeline.prices.layer_prices import LayerPrices
from meshwright.pipeline.prices.layer_pricing import Pricing
from meshwright.pipeline.prices.microbatch_weights import steady_weights, weighed
from meshwright.planner.grouping.numbering import pack
from meshwright.planner.methods import Auto, TensorParallel
from meshwright.planner.pricing.formulation import Formulation
from meshwright.solver import ChoiceProblem
from meshwright.solver.problem.priced import Usage, choice_problem

_OTHERS = 1e-4  # the weight of layers of other stages
FREE, STEADY, LEAN, TENSOR = "free", "steady", "lean", "tensor"
WAYS = (
    FREE,  # the fastest for one microbatch
    STEADY,  # the fastest for many
    LEAN,  # the one that needs least memory
    TENSOR,  # weights split, as in Megatron-LM
)
_MANY = 16  # microbatches


class MemoryPrice(NamedTuple):
    """The price of a stage's memory.

    Attributes:
        byte_s: Seconds of a microbatch that a byte is worth.
        in_flight: Microbatches in flight; of an interleaved stage, as parts of all its layers.
        spread: Numbers of replicas over which the optimizer's state, the gradients and the parameters are sharded.
    """

    byte_s: float
    in_flight: float
    spread: tuple[int, int, int]


class Own(NamedTuple):
    """A stage whose split is optimised on its own.

    Attributes:
        chunks: Its layers; None for all of them.
        num_microbatches: The number of microbatches in a step.
        checkpoint: The activation recomputation.
        exchange_s: Seconds per byte of a parameter that replicas take to exchange gradients or parameters once a step.
        memory: The price of its memory; None where memory does not bind.
    """

    chunks: tuple[tuple[int, int], ...] | None
    num_microbatches: int
    checkpoint: str = "none"
    exchange_s: float = 0.0
    memory: MemoryPrice | None = None

    def share(self, layers: Layers) -> Floats:
        """The share of each unit that is in the stage."""
        end, chunks = layers.first + layers.count, self.chunks or ((0, layers.num_layers),)
        parts = [np.clip(np.minimum(b, end) - np.maximum(a, layers.first), 0, None) for a, b in chunks]
        found: Floats = np.sum(parts, axis=0) / layers.count
        return found


def price_own(pricing: Pricing, mesh: Mesh, own: Own) -> LayerPrices | None:
    """The layers' prices under the best choice for a stage, or None if no choice is feasible."""
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
    pricing: Pricing, formulation: Formulation, own: Own, memory: MemoryPrice, share: Floats
) -> Iterator[tuple[int, Floats]]:
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


def _by_class(pricing: Pricing, formulation: Formulation, values: Ints, times: Floats) -> Iterator[tuple[int, Floats]]:
    """Bytes of some values on one device, each times its count: summed by class, for each strategy."""
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


Way = str | Own


def price_way(pricing: Pricing, mesh: Mesh, way: Way) -> LayerPrices | None:
    """The layers' prices on a view, or None if the view is infeasible."""
    if isinstance(way, Own):
        return price_own(pricing, mesh, way)
    if way == STEADY:
        return price_own(pricing, mesh, Own(None, _MANY))
    return pricing.price(mesh, TensorParallel() if way == TENSOR else Auto(), way == LEAN)
