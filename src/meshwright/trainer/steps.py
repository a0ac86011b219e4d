"""The pure functions of a run: its first state, its train step, and the loss of evaluation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.arrays import PyTree
from meshwright.trainer.models import TrainedModel
from meshwright.zoo.low_rank import adapted, init_adapters


def make_init(model: TrainedModel, optimizer: Any, adapters: PyTree) -> Callable[[Any], PyTree]:
    """``init(key)``: parameters, the optimizer's state, and the number of steps taken.

    Args:
        model: The model.
        optimizer: What optax made.
        adapters: Shapes of low-rank adapters, which are trained while the model's own weights are ``frozen``; or None.
    """

    def init(key: Any) -> PyTree:
        params = model.init(key)
        if adapters is None:
            return _state(params, optimizer)
        return _state(init_adapters(adapters, jax.random.fold_in(key, 1)), optimizer) | {"frozen": params}

    return init


def _state(params: PyTree, optimizer: Any) -> PyTree:
    return {"params": params, "optimizer": optimizer.init(params), "step": jnp.int32(0)}


def make_train_step(
    model: TrainedModel, optimizer: Any, scale: float
) -> Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]:
    """``train_step(state, batch) -> (state, {"loss", "grad_norm"})``, for one device."""
    import optax

    def train_step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        def loss(params: PyTree) -> jax.Array:
            whole = adapted(state["frozen"], params, scale) if "frozen" in state else params
            return model.loss(whole, batch)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, moments = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        after = state | {"params": params, "optimizer": moments, "step": state["step"] + 1}
        return after, {"loss": value, "grad_norm": optax.tree.norm(grads)}

    return train_step


def make_either_step(train_step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]) -> Callable[..., Any]:
    """``either_step(state, batch, learns)``: the train step, or its figures alone, with the state as it was.

    A pipeline's parameters are on the devices of its stages, where only the step's own programs compute with them: its
    loss of held-out rows is that of a step that learns nothing from them.
    """

    def either_step(state: PyTree, batch: PyTree, learns: Any) -> tuple[PyTree, PyTree]:
        after, results = train_step(state, batch)
        changed = {name: part for name, part in after.items() if name != "frozen"}
        kept = jax.tree.map(
            lambda new, old: jnp.where(learns, new, old), changed, {name: state[name] for name in changed}
        )
        return after | kept, results

    return either_step


def make_evaluation(model: TrainedModel, scale: float, *, has_adapters: bool) -> Callable[..., Any]:
    """The loss as a function of the state's parts, by the names that `mw.follow` finds their shardings by."""
    if not has_adapters:

        def held_out_loss(params: PyTree, batch: PyTree) -> jax.Array:
            return model.loss(params, batch)

        return held_out_loss

    def adapted_loss(params: PyTree, frozen: PyTree, batch: PyTree) -> jax.Array:
        return model.loss(adapted(frozen, params, scale), batch)

    return adapted_loss
