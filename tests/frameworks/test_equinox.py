"""Equinox modules: trees with functions among their leaves."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

from tests.frameworks.meshes import check_plans

KEY = jax.random.key(0)


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, 24, key=first)
        self.norm = eqx.nn.LayerNorm(24)
        self.mlp = eqx.nn.MLP(24, 24, 48, 1, key=second)

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        return jnp.mean(x + jax.vmap(self.mlp)(x), axis=0)


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell

    def __call__(self, x):
        return jax.lax.scan(lambda h, row: (self.cell(row, h), None), jnp.zeros(24), x)[0]


class Convolutions(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    head: eqx.nn.Linear

    def __call__(self, x):
        return self.head(jnp.mean(jax.nn.relu(self.norm(self.conv(x))), axis=(1, 2)))


def convolutions(key):
    first, second = jax.random.split(key)
    return Convolutions(eqx.nn.Conv2d(3, 8, 3, key=first), eqx.nn.GroupNorm(2, 8), eqx.nn.Linear(8, 24, key=second))


MODELS = {
    "mlp": (lambda: eqx.nn.MLP(24, 24, 48, 2, key=KEY), (24, 24)),
    "block": (lambda: Block(KEY), (24, 8, 24)),
    "convolutions": (lambda: convolutions(KEY), (24, 3, 8, 8)),
    "recurrent": (lambda: Recurrent(eqx.nn.GRUCell(24, 24, key=KEY)), (24, 6, 24)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_train_step_on_a_modules_arrays_is_planned_everywhere(name):
    make, shape = MODELS[name]
    (model, static), optimizer = eqx.partition(make(), eqx.is_array), optax.adam(1e-3)
    opt = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x, y = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((shape[0], 24), jnp.float32)

    def step(model, opt, x, y):
        value, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(eqx.combine(m, static))(x) - y) ** 2))(
            model
        )
        updates, opt = optimizer.update(grads, opt)
        return eqx.apply_updates(model, updates), opt, value

    check_plans(step, model, opt, x, y)


def test_a_module_with_functions_among_its_leaves_is_an_argument_like_any_other():
    def forward(model, x):
        return jax.vmap(model)(x)

    check_plans(forward, eqx.nn.MLP(24, 24, 48, 2, key=KEY), jax.ShapeDtypeStruct((24, 24), jnp.float32))
