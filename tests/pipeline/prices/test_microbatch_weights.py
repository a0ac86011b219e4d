"""Choices for many microbatches: by what their layers say, no choice for one microbatch is quicker."""

from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.pipeline.layers.batch_sizes import ResizableBatch
from meshwright.pipeline.prices.layer_prices import ALL_SECONDS, Item
from meshwright.pipeline.prices.layer_pricing import Pricing
from meshwright.pipeline.prices.stage_problem import Own, price_own
from meshwright.planner.methods import Auto
from tests.pipeline.models import layers_of, mlp

pytestmark = pytest.mark.slow

ONCE = [Item.GRADIENTS_SENT, Item.UPDATE, Item.UPDATE_SENT]


def tied(rows=16, width=256):
    """A table that is read at both ends, so that its gradient is two sums that are settled together."""

    def loss(params, x):
        table, w = params
        return jnp.mean(jax.nn.logsumexp(jnp.tanh(table[x] @ w) @ table.T, axis=-1))

    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))

    params = (jax.ShapeDtypeStruct((1024, width), jnp.float32), jax.ShapeDtypeStruct((width, width), jnp.float32))
    return step, (params, jax.ShapeDtypeStruct((rows, 32), jnp.int32))


def zoo_model(name, **options):
    example = zoo.build(name, batch=16, **options)
    return example.train_step, (example.state, example.batch)


MODELS = {
    "mlp": lambda: mlp(512, layers=4, rows=16, optimizer=optax.adam(1e-3)),
    "tied": tied,
    "gpt": lambda: zoo_model("gpt-tiny"),
    "wide-resnet": lambda: zoo_model("wide-resnet-tiny"),
    "mixtral": lambda: zoo_model("mixtral-tiny"),
}


@cache
def pricing_of(model):
    step, args = MODELS[model]()
    _, layers = layers_of(step, *args)
    return Pricing(ResizableBatch(trace(step, *args)).at(16), layers)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_no_choice_for_one_microbatch_is_quicker_for_many(model, shape):
    pricing, mesh = pricing_of(model), mw.cluster("2x2 l40s").mesh(shape)
    for many in (2, 16, 256):
        both = pricing.price(mesh, Auto()), price_own(pricing, mesh, Own(None, many))
        free, steady = (prices.items.sum(axis=1) for prices in both)
        times = [many * items[ALL_SECONDS].sum() - (many - 1) * items[ONCE].sum() for items in (free, steady)]
        assert times[1] <= times[0] * (1 + 1e-6)
        assert steady[ALL_SECONDS].sum() >= free[ALL_SECONDS].sum() * (1 - 1e-6)
