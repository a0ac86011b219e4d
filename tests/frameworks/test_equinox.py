"""Equinox modules: trees with functions, switches and sizes among their leaves."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.runtime.spmd import spmd
from tests.frameworks.meshes import check_plans

pytestmark = pytest.mark.devices

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


@pytest.mark.sweep(2)
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


class Options(eqx.Module):
    """What users put beside arrays: functions, and switches and sizes that their own Python code reads."""

    layers: list
    activation: Callable
    dropout: eqx.nn.Dropout
    repeats: int
    residual: bool
    label: str

    def __call__(self, x):
        for layer in self.layers * self.repeats:
            y = self.dropout(self.activation(layer(x)))
            x = x + y if self.residual else y
        return x


def options():
    layers = [eqx.nn.Linear(24, 24, key=k) for k in jax.random.split(KEY)]
    return Options(layers, jax.nn.gelu, eqx.nn.Dropout(0.1, inference=True), 2, True, "plain")


WHOLE = {name: make for name, (make, shape) in MODELS.items() if name in ("mlp", "block")} | {"options": options}


def example(name):
    """A train step on a whole module, and its arguments."""
    model, optimizer = WHOLE[name](), optax.sgd(0.1, momentum=0.9)
    shape = MODELS[name][1] if name in MODELS else (24, 24)
    first, second = jax.random.split(KEY)
    x, y = jax.random.normal(first, shape), jax.random.normal(second, (shape[0], 24))

    def step(model, opt, x, y):
        value, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
        updates, opt = optimizer.update(grads, opt)
        return eqx.apply_updates(model, updates), opt, value

    return step, (model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), x, y)


@pytest.mark.parametrize("name", WHOLE)
def test_a_module_passed_whole_is_planned_everywhere(name):
    step, args = example(name)
    check_plans(step, *args)


@pytest.mark.parametrize("name", WHOLE)
def test_a_module_passed_whole_trains_as_on_one_device(name, tmp_path):
    step, (model, opt, x, y) = example(name)
    plan = mw.plan(step, model, opt, x, y, mesh=mw.Mesh.abstract((2, 4), alpha=1, beta=1))
    plan.save(tmp_path / "plan.json")
    program, alone = spmd(mw.Plan.load(tmp_path / "plan.json"), step), eqx.filter_jit(step)
    many, one = (model, opt), (model, opt)
    for _ in range(2):
        *many, loss = program(*many, x, y)
        *one, expected = alone(*one, x, y)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert jax.tree.structure(many) == jax.tree.structure(one)
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        if eqx.is_array(a):
            np.testing.assert_allclose(a, b, atol=1e-5)
        else:
            assert a is b


class Dropping(eqx.Module):
    """Of each kind of leaf one: arrays, a function, a switch, a text, numbers."""

    linear: eqx.nn.Linear
    drop: eqx.nn.Dropout
    activation: Callable
    name: str
    power: int

    def __init__(self, key, rate):
        self.linear, self.drop = eqx.nn.Linear(8, 8, key=key), eqx.nn.Dropout(rate, inference=True)
        self.activation, self.name, self.power = jnp.tanh, "dropping", 2

    def __call__(self, x):
        return self.drop(self.activation(self.linear(x))) ** self.power


def test_a_state_is_created_with_its_switches_as_they_are():
    optimizer = optax.sgd(0.1, momentum=0.9)

    def init(key, rate):
        model = Dropping(key, rate)
        return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), 0

    @mw.parallelize(cluster="1x2 cpu", method="zero3")
    def step(state, x):
        model, opt, count = state
        loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
        updates, opt = optimizer.update(grads, opt)
        return (eqx.apply_updates(model, updates), opt, count + 1), loss

    x = np.ones((8, 8), np.float32)
    state, expected = mw.create_state(init, KEY, 0.5, like=step, example=(x,)), init(KEY, 0.5)
    drop, count = state[0].drop, state[2]
    assert (drop.p, drop.inference, state[0].power, count) == (0.5, True, 2, 0)
    assert (type(drop.p), type(drop.inference), type(state[0].power), type(count)) == (float, bool, int, int)
    assert state[0].activation is jnp.tanh and state[0].name == "dropping"
    assert len(state[0].linear.weight.sharding.device_set) == 2
    one = eqx.filter_jit(step.function)
    for _ in range(2):
        (state, loss), (expected, loss_of_one) = step(state, x), one(expected, x)
        np.testing.assert_allclose(loss, loss_of_one, rtol=1e-6)
    assert int(state[2]) == 2


class Scaled(eqx.Module):
    weight: jax.Array
    scale: float = 2.0
    power: int = 3

    def __call__(self, x):
        return jnp.tanh(x @ self.weight) ** self.power * self.scale


def test_numbers_in_a_module_are_not_trained():
    """They were traced, and Equinox takes a rate that is traced for a parameter."""

    def step(model, x):
        loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda grad: -0.1 * grad, grads)), loss

    planned, one = mw.parallelize(step, cluster="1x2 cpu", donate_argnums=()), eqx.filter_jit(step)
    weight, x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), np.eye(8, dtype=np.float32)
    model, expected = Scaled(jnp.asarray(weight)), Scaled(jnp.asarray(weight))
    for _ in range(2):
        (model, _), (expected, _) = planned(model, x), one(expected, x)
    assert (type(model.scale), model.scale, type(model.power), model.power) == (float, 2.0, int, 3)
    np.testing.assert_allclose(model.weight, expected.weight, rtol=1e-6)
    assert len(planned.plans) == 1
