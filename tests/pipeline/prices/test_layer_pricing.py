"""Prices by layer add up to what the intra-op planner says of the whole."""

import numpy as np
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.pipeline.layers.batch_sizes import ResizableBatch
from meshwright.pipeline.layers.layers import Wishes, find_layers
from meshwright.pipeline.prices.layer_prices import Item
from meshwright.pipeline.prices.layer_pricing import Pricing
from meshwright.planner.methods import Auto, TensorParallel
from meshwright.planner.planner import Task
from tests.pipeline.models import flow_of

pytestmark = pytest.mark.slow

TIMES = [i for i in Item if not i.name.endswith("_BYTES")]
PARTS = {  # of other items
    *(Item.WEIGHTS, Item.REPEATED, Item.REPEATED_SENT, Item.AGAIN, Item.AGAIN_SENT),
    *(Item.FORWARD_PRODUCTS, Item.BACKWARD_PRODUCTS, Item.AGAIN_PRODUCTS),
}


@pytest.fixture(scope="module", params=[{}, {"scan": True}, {"checkpoint": True}])
def model(request):
    example = zoo.build("llama-tiny", batch=8, layers=4, **request.param)
    args = (example.train_step, example.state, example.batch)
    return trace(*args), find_layers(flow_of(*args), Wishes())


@pytest.mark.parametrize("method", [Auto(), TensorParallel()])
def test_layers_add_up_to_the_whole(model, method):
    traced, layers = model
    mesh = mw.cluster("1x2 h100").mesh((2,))
    prices = Pricing(ResizableBatch(traced).at(8), layers).price(mesh, method)
    found = sum(prices.items[i].sum() for i in TIMES if i not in PARTS)
    whole = Task(traced, type(method)(memory_fraction=1.0)).plan([mesh], lambda _: None)
    assert found == pytest.approx(whole.step_s, rel=1e-6)
    state = prices.items[[Item.PARAMETER_BYTES, Item.OPTIMIZER_BYTES]].sum()
    held = whole.memory.argument_bytes
    assert state == pytest.approx(held["parameters"] + held["optimizer"], rel=0.01)


def test_layers_that_repeat_cost_alike(model):
    traced, layers = model
    prices = Pricing(ResizableBatch(traced).at(4), layers).price(mw.cluster("1x1 h100").mesh((1,)), Auto())
    middle = prices.items[:, 1:3]
    assert middle[:, 0] == pytest.approx(middle[:, 1], rel=1e-6)
    assert (prices.items[Item.WEIGHTS] < 0.7 * prices.items[Item.BACKWARD]).all()
    assert (prices.items[Item.KEPT_BYTES][1:3] <= prices.items[Item.HELD_BYTES][1:3] * (1 + 1e-9)).all()


def test_what_a_method_lays_down_leaves_the_prices_of_others_alone(model):
    """All methods share the tables of a view."""
    traced, layers = model
    mesh, methods = mw.cluster("1x4 h100").mesh((4,)), (Auto(), TensorParallel())
    pricing = Pricing(ResizableBatch(traced).at(8), layers)
    shared = [pricing.price(mesh, method) for method in (*methods, *methods)]
    for method, first, again in zip(methods, shared[:2], shared[2:], strict=True):
        alone = Pricing(ResizableBatch(traced).at(8), layers).price(mesh, method)
        assert (first.items == alone.items).all()
        assert (again.items == alone.items).all()
        assert first.specs == again.specs == alone.specs


def test_the_lean_choice_needs_no_more_memory(model):
    traced, layers = model
    pricing = Pricing(ResizableBatch(traced).at(8), layers)
    mesh = mw.cluster("1x4 h100").mesh((4,))
    fast, lean = (pricing.price(mesh, Auto(), dear) for dear in (False, True))
    needed = [i for i in Item if i.name in ("PARAMETER_BYTES", "OPTIMIZER_BYTES", "HELD_BYTES")]
    assert np.sum(lean.items[needed]) <= np.sum(fast.items[needed]) * 1.001
    assert lean.batch_parts in (1, 2, 4)
