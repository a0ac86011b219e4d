"""Haiku modules, transformed as its manual says."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest

from tests.frameworks.meshes import check_plans

pytestmark = pytest.mark.devices


def mlp(x):
    return hk.nets.MLP([48, 24])(x)


def block(x):
    x = x + hk.MultiHeadAttention(4, 6, w_init=hk.initializers.VarianceScaling(), model_size=24)(x, x, x)
    return jnp.mean(hk.LayerNorm(-1, True, True)(x), axis=1)


def convolutions(x):
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Conv2D(8, 3)(x), is_training=True))
    return hk.Linear(24)(jnp.mean(x, axis=(1, 2)))


def recurrent(x):
    core = hk.LSTM(24)
    return hk.dynamic_unroll(core, x.swapaxes(0, 1), core.initial_state(x.shape[0]))[0][-1]


MODELS = [(mlp, (24, 24)), (block, (24, 8, 24)), (convolutions, (24, 8, 8, 3)), (recurrent, (24, 6, 24))]


@pytest.mark.parametrize(("model", "shape"), MODELS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_train_step_is_planned_everywhere(model, shape):
    transformed, optimizer = hk.transform_with_state(model), optax.adam(1e-3)
    x, y = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((shape[0], 24), jnp.float32)
    params, state = jax.eval_shape(transformed.init, jax.random.key(0), x)
    opt = jax.eval_shape(optimizer.init, params)

    def step(params, opt, state, x, y):
        def loss(params):
            out, after = transformed.apply(params, state, None, x)
            return jnp.mean((out - y) ** 2), after

        (value, after), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, new_opt = optimizer.update(grads, opt)
        return optax.apply_updates(params, updates), new_opt, after, value

    check_plans(step, params, opt, state, x, y)
