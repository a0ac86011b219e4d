"""Flax linen modules as they come, trained by Optax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from tests.frameworks.meshes import check_plans

pytestmark = pytest.mark.devices


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Dense(48)(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(24)(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        y = nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        x = x + y
        return jnp.mean(x + nn.Dense(24)(nn.gelu(nn.Dense(48)(nn.LayerNorm()(x)))), axis=1)


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(24)(x.reshape(x.shape[0], -1))


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(24)(nn.RNN(nn.LSTMCell(24))(x)[:, -1])


MODELS = [(Mlp, (24, 24)), (Block, (24, 8, 24)), (Convolutions, (24, 8, 8, 3)), (Recurrent, (24, 6, 24))]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("model", "shape"), MODELS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_train_step_is_planned_everywhere(model, shape):
    module, optimizer = model(), optax.adamw(1e-3)
    x, y = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((shape[0], 24), jnp.float32)

    def init(x):
        variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x, True)
        return {"variables": variables, "opt": optimizer.init(variables["params"])}

    def step(state, x, y, key):
        rest = {k: v for k, v in state["variables"].items() if k != "params"}

        def loss(params):
            out, changed = module.apply(
                {"params": params, **rest}, x, True, mutable=["batch_stats"], rngs={"dropout": key}
            )
            return jnp.mean((out - y) ** 2), changed

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(state["variables"]["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["variables"]["params"])
        params = optax.apply_updates(state["variables"]["params"], updates)
        return {"variables": {"params": params, **rest, **changed}, "opt": opt}, value

    check_plans(step, jax.eval_shape(init, x), x, y, jax.random.key(2))
