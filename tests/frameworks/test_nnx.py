"""Flax nnx modules: split into graph and state, and handed over as they are."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.graph import trace
from tests.frameworks.meshes import check_plans

pytestmark = pytest.mark.devices


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(24, 48, rngs=rngs), nnx.Linear(48, 24, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(24, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 24, decode=False, rngs=rngs)
        self.mlp = Mlp(rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return jnp.mean(x + self.mlp(x), axis=1)


class Convolutions(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 24, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.mean(nnx.relu(self.norm(self.conv(x))), axis=(1, 2)))


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.GRUCell(24, 24, rngs=rngs))

    def __call__(self, x):
        return self.rnn(x)[:, -1]


MODELS = [(Mlp, (24, 24)), (Block, (24, 8, 24)), (Convolutions, (24, 8, 8, 3)), (Recurrent, (24, 6, 24))]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("model", "shape"), MODELS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_split_train_step_is_planned_everywhere(model, shape):
    graph, params, rest = nnx.split(model(nnx.Rngs(0)), nnx.Param, ...)
    optimizer = optax.adam(1e-3)
    opt = optimizer.init(params)
    x, y = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((shape[0], 24), jnp.float32)

    def step(params, opt, rest, x, y):
        def loss(params):
            module = nnx.merge(graph, params, rest, copy=True)
            value = jnp.mean((module(x) - y) ** 2)
            return value, nnx.split(module, nnx.Param, ...)[2]

        (value, rest_after), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, new_opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), new_opt, rest_after, value

    check_plans(step, params, opt, rest, x, y)


def test_a_module_is_an_argument_like_any_other():
    def forward(module, x):
        return module(x)

    check_plans(forward, Mlp(nnx.Rngs(0)), jax.ShapeDtypeStruct((24, 24), jnp.float32))


def update_in_place(model, optimizer, x):
    value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1.0) ** 2))(model)
    optimizer.update(model, grads)
    return value


def test_a_module_updated_in_place_is_refused_since_it_would_not_train():
    model = Mlp(nnx.Rngs(0))
    args = (model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), jax.ShapeDtypeStruct((8, 24), jnp.float32))
    step = mw.parallelize(update_in_place, cluster="1x2 cpu", batch_argnums=(2,))
    with pytest.raises(
        mw.TraceError, match=r"changes model/down/bias/value and \d+ more leaves .* nnx.split"
    ) as caught:
        step.plan(*args)
    assert "model, optimizer, loss = step(model, optimizer, batch)" in str(caught.value)


def test_a_module_whose_statistics_would_be_lost_is_refused():
    with pytest.raises(mw.TraceError, match="changes module/norm/mean/value and 1 more leaf"):
        trace(lambda module, x: module(x), Convolutions(nnx.Rngs(0)), jax.ShapeDtypeStruct((8, 8, 8, 3), jnp.float32))


def test_a_module_updated_in_place_and_returned_trains():
    def step(model, optimizer, x):
        value = update_in_place(model, optimizer, x)
        return model, optimizer, value

    def run(function):
        model = Mlp(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        losses = []
        for _ in range(3):
            model, optimizer, value = function(model, optimizer, jnp.ones((8, 24)))
            losses.append(float(value))
        return losses

    many = mw.parallelize(step, cluster="1x2 cpu", batch_argnums=(2,))
    found = run(many)
    assert found == pytest.approx(run(nnx.jit(step)), rel=1e-5) and found[2] < found[0]
