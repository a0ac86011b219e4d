"""A residual network in each framework, trained as its manual says: what a pipeline cuts as it comes."""

from functools import partial

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

WIDTH, LAYERS, ROWS = 8, 4, 16
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def batch_of(dtype):
    draw = np.random.default_rng(0)
    return {name: draw.normal(size=(ROWS, WIDTH)).astype(dtype) for name in ("x", "y")}


def _step(loss):
    """A train step for parameters that are a tree of arrays."""

    def step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = OPTIMIZER.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step


def _error(found, batch):
    return jnp.mean((found - batch["y"]) ** 2)


class _Linen(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        dense = partial(nn.Dense, dtype=self.dtype, param_dtype=self.dtype)
        for _ in range(LAYERS):
            y = nn.LayerNorm(dtype=self.dtype, param_dtype=self.dtype)(x)
            x = x + dense(WIDTH)(nn.gelu(dense(2 * WIDTH)(y)))
        return x


def linen(dtype):
    """Flax linen."""
    model, batch = _Linen(dtype), batch_of(dtype)

    def init(key):
        params = model.init(key, batch["x"])
        return {"params": params, "opt": OPTIMIZER.init(params)}

    return init, _step(lambda params, b: _error(model.apply(params, b["x"]), b)), batch


class _Nnx(nnx.Module):
    def __init__(self, dtype, rngs):
        linear = partial(nnx.Linear, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.up = nnx.List([linear(WIDTH, 2 * WIDTH) for _ in range(LAYERS)])
        self.down = nnx.List([linear(2 * WIDTH, WIDTH) for _ in range(LAYERS)])

    def __call__(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nnx.gelu(up(x)))
        return x


def nnx_module(dtype):
    """Flax nnx, split into graph and parameters."""
    graph, _ = nnx.split(_Nnx(dtype, nnx.Rngs(0)))

    def init(key):
        _, params = nnx.split(_Nnx(dtype, nnx.Rngs(key)))
        return {"params": params, "opt": OPTIMIZER.init(params)}

    return init, _step(lambda params, b: _error(nnx.merge(graph, params)(b["x"]), b)), batch_of(dtype)


class _Equinox(eqx.Module):
    layers: list

    def __init__(self, dtype, key):
        keys = jax.random.split(key, LAYERS)
        self.layers = [eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, dtype=dtype, key=k) for k in keys]

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def equinox(dtype):
    """Equinox, its module being the parameters as it is."""

    def init(key):
        model = _Equinox(dtype, key)
        return {"params": model, "opt": OPTIMIZER.init(eqx.filter(model, eqx.is_array))}

    def step(state, batch):
        model = state["params"]
        value, gradients = eqx.filter_value_and_grad(lambda m: _error(jax.vmap(m)(batch["x"]), batch))(model)
        updates, opt = OPTIMIZER.update(gradients, state["opt"], eqx.filter(model, eqx.is_array))
        return {"params": eqx.apply_updates(model, updates), "opt": opt}, value

    return init, step, batch_of(dtype)


def haiku(dtype):
    """Haiku."""

    def forward(x):
        for _ in range(LAYERS):
            x = x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(2 * WIDTH)(x)))
        return x

    model, batch = hk.without_apply_rng(hk.transform(forward)), batch_of(dtype)

    def init(key):
        params = model.init(key, batch["x"])
        return {"params": params, "opt": OPTIMIZER.init(params)}

    return init, _step(lambda params, b: _error(model.apply(params, b["x"]), b)), batch


FRAMEWORKS = {"Flax linen": linen, "Flax nnx": nnx_module, "Equinox": equinox, "Haiku": haiku}
