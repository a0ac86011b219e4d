"""Routing by one-hot einsums equals routing token by token."""

from functools import partial

import jax
import numpy as np
import pytest

from meshwright.zoo import moe

RNG = np.random.default_rng(0)
top2_combine = jax.jit(moe.top2_combine, static_argnums=1)


def route_one_by_one(gates, capacity, active=2):
    """The same routing in plain Python: all first choices in order, then all second choices, and so on."""
    tokens, experts = gates.shape
    combine = np.zeros((tokens, experts, capacity))
    ranked = np.argsort(-gates, axis=-1)
    filled = [0] * experts
    for choice in range(active):
        for token in range(tokens):
            expert = ranked[token, choice]
            if filled[expert] < capacity:
                weight = gates[token, expert] / gates[token, ranked[token, :active]].sum()
                combine[token, expert, filled[expert]] = weight
            filled[expert] += 1
    return combine


def test_top2_combine_equals_routing_one_by_one():
    gates = RNG.dirichlet([0.5] * 4, (3, 16)).astype(np.float32)
    combine, _ = top2_combine(gates, 6)
    for group in range(3):
        np.testing.assert_allclose(combine[group], route_one_by_one(gates[group], 6), rtol=1e-5, atol=1e-7)
    assert (np.asarray(combine) > 0).sum() < 2 * 3 * 16  # some token found its buffer full


@pytest.mark.parametrize("active", [1, 2, 3])
def test_top_combine_equals_routing_one_by_one(active):
    gates = RNG.dirichlet([0.5] * 5, (3, 16)).astype(np.float32)
    combine, aux = jax.jit(moe.top_combine, static_argnums=(1, 2))(gates, active, 5)
    for group in range(3):
        expected = route_one_by_one(gates[group], 5, active)
        np.testing.assert_allclose(combine[group], expected, rtol=1e-5, atol=1e-7)
    if active == 2:
        np.testing.assert_allclose(combine, top2_combine(gates, 5)[0], rtol=1e-5, atol=1e-7)
    assert aux > 1


def test_even_load_has_an_auxiliary_loss_of_one():
    gates = np.tile(np.eye(4, dtype=np.float32) * 0.96 + 0.01, (1, 4, 1))
    _, aux = top2_combine(gates, 8)
    np.testing.assert_allclose(aux, 1.0, rtol=1e-6)


def test_identity_experts_with_room_for_all_return_the_input():
    x, router = RNG.normal(size=(2, 8, 4)).astype(np.float32), RNG.normal(size=(4, 4)).astype(np.float32)
    mixture = partial(moe.mixture, experts=lambda inputs: inputs, group_size=16, capacity_factor=4.0)
    mixed, _ = jax.jit(mixture)(x, router)
    np.testing.assert_allclose(mixed, x, rtol=1e-5, atol=1e-6)
