"""A stage's own split: by what its layers say, no split of the whole model is quicker for it, or needs less memory."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

import meshwright as mw
from meshwright.graph import trace
from meshwright.pipeline.layers.batch_sizes import ResizableBatch
from meshwright.pipeline.prices.layer_prices import ALL_SECONDS, Item
from meshwright.pipeline.prices.layer_pricing import Pricing
from meshwright.pipeline.prices.stage_problem import _OTHERS, WAYS, MemoryPrice, Own, own_problem, price_own, price_way
from meshwright.planner.methods import Auto
from meshwright.planner.reading.readback import Readback
from meshwright.solver import price
from tests.pipeline.models import layers_of
from tests.pipeline.prices.test_microbatch_weights import MODELS, zoo_model

pytestmark = pytest.mark.slow

ONCE = [Item.GRADIENTS_SENT, Item.UPDATE, Item.UPDATE_SENT]
CASES = {name: model for name, model in MODELS.items() if name != "mixtral"} | {
    "mixed": lambda: zoo_model("mixtral-tiny", dtype="bfloat16"),
    "scan": lambda: zoo_model("llama-tiny", layers=4, scan=True),
}


@cache
def pricing_of(model):
    step, args = CASES[model]()
    _, layers = layers_of(step, *args)
    return Pricing(ResizableBatch(trace(step, *args)).at(16), layers)


def priced(model, shape=(4,)):
    return pricing_of(model), mw.cluster("2x2 l40s").mesh(shape)


def seconds(items, many, checkpoint):
    """Seconds of each layer with so many microbatches, for one of them."""
    each = items[ALL_SECONDS].sum(axis=0) - (1 - 1 / many) * items[ONCE].sum(axis=0)
    if checkpoint == "none":
        return each
    again = (Item.FORWARD, Item.FORWARD_SENT) if checkpoint == "full" else (Item.AGAIN, Item.AGAIN_SENT)
    return each + items[list(again)].sum(axis=0)


def weighed(by_layer, chunks):
    inside = np.zeros(len(by_layer), bool)
    for first, last in chunks:
        inside[first:last] = True
    return by_layer[inside].sum() + _OTHERS * by_layer[~inside].sum()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("model", [name for name in CASES if name != "scan"])  # parts of a loop are split alike
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_no_split_of_the_whole_model_is_quicker_for_a_range(model, shape):
    pricing, mesh = priced(model, shape)
    rng, count = np.random.default_rng(0), pricing.layers.num_layers
    whole = [price_way(pricing, mesh, way) for way in WAYS]
    for _ in range(6):
        first = int(rng.integers(0, count))
        chunks = ((first, int(rng.integers(first + 1, count + 1))),)
        many, checkpoint = int(rng.choice([1, 4, 64])), str(rng.choice(["none", "selective", "full"]))
        own = price_own(pricing, mesh, Own(chunks, many, checkpoint))
        least = min(weighed(seconds(p.items, many, checkpoint), chunks) for p in whole if p is not None)
        assert weighed(seconds(own.items, many, checkpoint), chunks) <= least * (1 + 1e-6)


@pytest.mark.parametrize("model", [name for name in CASES if name != "scan"])
@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_layers_are_priced_as_the_problem_says(model, checkpoint):
    """Of any choice, not of the best alone."""
    pricing, mesh = priced(model, (2, 2))
    formulation, rng = pricing.formulate(mesh, Auto()), np.random.default_rng(1)
    own = Own(((0, max(pricing.layers.num_layers // 2, 1)),), 8, checkpoint)
    problem = own_problem(pricing, formulation, own)
    for _ in range(5):
        choice = np.array([rng.integers(0, len(cost)) for cost in formulation.costs])
        by_layer = seconds(pricing._read(Readback(formulation, choice)).items, 8, checkpoint)
        assert weighed(by_layer, own.chunks) == pytest.approx(price(problem, choice).cost, rel=1e-6)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_the_dearer_memory_is_the_less_a_range_needs_and_the_longer_it_takes(model, checkpoint):
    pricing, mesh = priced(model)
    chunks, in_flight, spread = ((0, max(pricing.layers.num_layers // 2, 1)),), 3.0, (2, 1, 1)
    held = {"none": Item.HELD_BYTES, "selective": Item.KEPT_BYTES, "full": Item.INPUT_BYTES}[checkpoint]
    found = []
    for rate in (0.0, 1e-14, 1e-12, 1e-9):
        items = price_own(pricing, mesh, Own(chunks, 8, checkpoint, 0.0, MemoryPrice(rate, in_flight, spread))).items
        part = items[:, : chunks[0][1]].sum(axis=1)
        needed = part[Item.PARAMETER_BYTES] + part[Item.COPY_BYTES] + part[Item.GRADIENT_BYTES]
        needed += part[Item.OPTIMIZER_BYTES] / spread[0] + in_flight * part[held]
        found.append((weighed(seconds(items, 8, checkpoint), chunks), needed))
    for (quick_s, more), (slow_s, less) in pairwise(found):
        assert quick_s <= slow_s * (1 + 1e-6) and less <= more * (1 + 1e-6)


def test_what_replicas_exchange_makes_fewer_bytes_of_parameters_worth_more():
    pricing, mesh = priced("mlp")
    chunks = ((0, pricing.layers.num_layers),)
    sizes = [
        price_own(pricing, mesh, Own(chunks, 4, "none", rate)).items[Item.PARAMETER_BYTES].sum() for rate in (0.0, 1e-6)
    ]
    assert sizes[1] <= sizes[0] / 2
