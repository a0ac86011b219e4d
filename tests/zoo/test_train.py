"""The optimizer agrees with Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright.zoo import train


def loss(params, batch):
    return jnp.sum(jnp.square(params["w"] @ batch - params["b"]))


@pytest.mark.parametrize("optimizer", [train.AdamW(), train.AdamW(weight_decay=0.0, clip_norm=None)])
def test_three_steps_equal_optax(optimizer):
    reference = optax.adamw(
        optimizer.learning_rate,
        optimizer.beta1,
        optimizer.beta2,
        optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
    )
    if optimizer.clip_norm is not None:
        reference = optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), reference)
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32), "b": jnp.ones(4)}
    batch = jnp.array([1.0, 2.0, 3.0])
    state, expected, opt_state = train.init_state(params), params, reference.init(params)
    step = jax.jit(train.make_train_step(loss, optimizer))

    @jax.jit
    def reference_step(params, opt_state):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = reference.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    for _ in range(3):
        state, value = step(state, batch)
        expected, opt_state, expected_value = reference_step(expected, opt_state)
        np.testing.assert_allclose(value, expected_value, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state["params"], expected)


def test_clipping_leaves_small_gradients_alone():
    grads = {"w": jnp.array([0.3, 0.4])}
    np.testing.assert_array_equal(train.clip_by_global_norm(grads, 1.0)["w"], grads["w"])
    np.testing.assert_allclose(jnp.linalg.norm(train.clip_by_global_norm(grads, 0.1)["w"]), 0.1, rtol=1e-4)
