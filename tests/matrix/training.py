"""Train steps around a model: optimizers, loss scaling, averages of parameters, as scripts have them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.matrix.parts import batch_of
from tests.matrix.precision import Precision

SEED = 7


@dataclass(frozen=True)
class Training:
    """A program to train.

    Attributes:
        init: Makes the state from a key: a tuple where the step takes several arguments.
        step: The parts of the state and a batch to the parts of the next state and metrics.
        batch: An example.
        num_state: How many arguments the state has.
        jit: The framework's own way to compile a function for one device.
    """

    init: Callable[[Any], Any]
    step: Callable[..., Any]
    batch: Any
    num_state: int = 1
    jit: Callable[[Any], Any] = jax.jit


@dataclass(frozen=True)
class Model:
    """A model whose parameters are a tree.

    Attributes:
        init: A key and a batch to parameters, and the rest of the state: statistics, and what is frozen.
        loss: Parameters, rest, batch and key to the loss and the new rest.
    """

    init: Callable[[Any, Any], tuple[Any, Any]]
    loss: Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def optimizer_of(program: str) -> optax.GradientTransformation:
    """Clipped momentum; embeddings by Adam where the program has two optimizers."""
    sgd = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    if program != "two optimizers":
        return sgd
    return optax.multi_transform({"embedding": optax.adam(1e-2), "body": sgd}, _kinds)


def _kinds(params: Any) -> Any:
    def kind(path: Any, _: Any) -> str:
        return "embedding" if "embed" in jax.tree_util.keystr(path).lower() else "body"

    return jax.tree_util.tree_map_with_path(kind, params)


def trained(program: str, precision: Precision, model: Model, by_flax: bool = False) -> Training:
    """The train step of a model, its state being a dict."""
    optimizer, batch = optimizer_of(program), batch_of(program)
    gradients = partial(_scaled_by_flax if by_flax else _scaled) if precision.is_scaled else _unscaled

    def init(key: Any) -> Any:
        params, rest = model.init(key, batch)
        state = {"params": params, "rest": rest, "opt": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}
        if program == "EMA":
            state["average"] = params
        if precision.is_scaled:
            state["scale"] = _flax_scale() if by_flax else {"factor": jnp.float32(2.0**12), "good": jnp.int32(0)}
        return state

    def step(state: Any, batch: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(SEED), state["step"])
        loss = partial(model.loss, rest=state["rest"], batch=batch, key=key)
        value, rest, found, is_finite, changed = gradients(lambda p: loss(p), state)
        updates, opt = optimizer.update(found, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        if precision.is_scaled:
            old, new = (state["params"], state["opt"]), (params, opt)
            params, opt = jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)
        after = state | changed | {"params": params, "rest": rest, "opt": opt, "step": state["step"] + 1}
        if program == "EMA":
            after["average"] = optax.incremental_update(params, state["average"], 0.1)
        return after, {"loss": value, "norm": optax.tree.norm(found)}

    return Training(init, step, batch)


def _unscaled(loss: Any, state: Any) -> Any:
    (value, rest), found = jax.value_and_grad(loss, has_aux=True)(state["params"])
    return value, rest, found, True, {}


def _scaled(loss: Any, state: Any) -> Any:
    """The loss is scaled up, gradients down; a step that overflowed halves the scale, many that did not double it."""
    factor, good = state["scale"]["factor"], state["scale"]["good"]

    def scaled(params: Any) -> Any:
        value, rest = loss(params)
        return value * factor, (value, rest)

    found, (value, rest) = jax.grad(scaled, has_aux=True)(state["params"])
    found = jax.tree.map(lambda g: g / factor, found)
    is_finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(found)]))
    grows = good >= 1
    larger = jnp.where(grows, factor * 2, factor)
    scale = {
        "factor": jnp.where(is_finite, larger, factor / 2),
        "good": jnp.where(is_finite & ~grows, good + 1, 0),
    }
    return value, rest, found, is_finite, {"scale": scale}


def _flax_scale() -> Any:
    from flax.training.dynamic_scale import DynamicScale

    return DynamicScale(growth_interval=1, scale=2.0**12)


def _scaled_by_flax(loss: Any, state: Any) -> Any:
    scale, is_finite, (value, rest), found = state["scale"].value_and_grad(loss, has_aux=True)(state["params"])
    return value, rest, found, is_finite, {"scale": scale}
