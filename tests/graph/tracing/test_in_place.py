"""Arguments that a function changes in place: what would be lost is refused, what comes back or is used is not."""

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.graph.tracing.call import call_abstractly

W = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32), "n": jax.ShapeDtypeStruct((), jnp.int32)}
X = {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}


def loss(state, batch):
    return jnp.mean((batch["x"] @ state["w"]) ** 2)


def update(state, batch):
    value, grads = jax.value_and_grad(loss, allow_int=True)(dict(state), batch)
    state["w"] = state["w"] - 0.1 * grads["w"]
    state["n"] += 1
    return value


def test_an_update_in_place_that_is_not_returned_is_refused():
    with pytest.raises(
        mw.TraceError, match=r"update changes state/n and 1 more leaf of its arguments in place and does not"
    ):
        call_abstractly(update, (W, X))
    assert set(W) == {"w", "n"} and isinstance(W["w"], jax.ShapeDtypeStruct), "the caller's own is as it was"


def test_an_update_in_place_that_is_returned_is_fine():
    def step(state, batch):
        value = update(state, batch)
        return state, value

    assert len(call_abstractly(step, (W, X)).program.outputs) == 3


def test_a_copy_of_what_was_changed_may_come_back():
    def step(state, batch):
        value = update(state, batch)
        return {"w": state["w"] * 1.0, "n": state["n"] + 0}, value

    assert len(call_abstractly(step, (W, X)).program.outputs) == 3


def test_a_batch_may_be_prepared_in_its_own_dict():
    def evaluate(state, batch):
        batch["x"] = batch["x"] / 255
        batch["squares"] = batch["x"] ** 2  # a cache of its own
        batch.pop("unused", None)
        return loss(state, batch)

    assert "div" in [one.name for one in call_abstractly(evaluate, (W, X)).program.operations]


@pytest.mark.parametrize("transform", [jax.grad, jax.jit, jax.checkpoint], ids=lambda t: t.__name__)
def test_what_a_function_inside_leaves_in_an_argument_is_of_no_use_to_the_caller(transform):
    def step(state, batch):
        def inside(w):
            batch["x"] = batch["x"] * w.sum()
            return jnp.mean(w)

        return transform(inside)(state["w"])

    assert len(call_abstractly(step, (W, X)).program.outputs) == 1
