"""The train step shared by all models: gradients, global-norm clipping and AdamW, on plain pytrees."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


@dataclass(frozen=True)
class AdamW:
    """Settings of AdamW (https://arxiv.org/abs/1711.05101); with no decay and no clipping it is Adam."""

    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0


def init_state(params: PyTree) -> PyTree:
    """Returns the train state of fresh parameters: both moments zero, no step taken."""
    return {
        "params": params,
        "mu": jax.tree.map(_zeros_like, params),
        "nu": jax.tree.map(_zeros_like, params),
        "step": jnp.int32(0),
    }


def _zeros_like(x: Any) -> jax.Array:
    """Zeros, of NumPy where arrays are wanted now: JAX would compile a program for every shape."""
    return jnp.zeros_like(x) if isinstance(x, jax.core.Tracer) else jax.device_put(np.zeros(x.shape, x.dtype))


def make_train_step(loss: Callable[[PyTree, PyTree], Any], optimizer: AdamW) -> Callable[..., tuple[PyTree, Any]]:
    """Returns `train_step(state, batch) -> (new_state, loss)` for a function `loss(params, batch)`."""

    def train_step(state: PyTree, batch: PyTree) -> tuple[PyTree, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        if optimizer.clip_norm is not None:
            grads = clip_by_global_norm(grads, optimizer.clip_norm)
        return update(optimizer, state, grads), value

    return train_step


def clip_by_global_norm(grads: PyTree, limit: float) -> PyTree:
    """Scales all gradients by one factor so that their joint norm is at most `limit`."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(1.0, limit / (norm + 1e-6))
    return jax.tree.map(lambda g: g * scale, grads)


def update(optimizer: AdamW, state: PyTree, grads: PyTree) -> PyTree:
    """Takes one AdamW step; moments and parameters keep their dtypes."""
    b1, b2 = optimizer.beta1, optimizer.beta2
    step = state["step"] + 1
    mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["mu"], grads)
    nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state["nu"], grads)
    correction1 = 1 - b1 ** step.astype(jnp.float32)
    correction2 = 1 - b2 ** step.astype(jnp.float32)

    def move(p: Any, m: Any, v: Any) -> jax.Array:
        direction = (m / correction1) / (jnp.sqrt(v / correction2) + optimizer.epsilon)
        if optimizer.weight_decay:
            direction += optimizer.weight_decay * p
        return (p - optimizer.learning_rate * direction).astype(p.dtype)

    params = jax.tree.map(move, state["params"], mu, nu)
    return {"params": params, "mu": mu, "nu": nu, "step": step}
