"""Routing by one-hot einsums equals routing token by token."""

from functools import partial

import jax
import numpy as np
import pytest

from meshwright.zoo import llama, moe

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
    options = {"experts": lambda _, inputs: inputs, "weights": {}, "group_size": 16, "capacity_factor": 4.0}
    mixed, _ = jax.jit(partial(moe.mixture, **options))(x, router)
    np.testing.assert_allclose(mixed, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("active", [2, 3])
def test_few_tokens_read_the_experts_they_choose_and_no_others(active):
    x, router = RNG.normal(size=(1, 8, 6)).astype(np.float32), RNG.normal(size=(6, 8)).astype(np.float32)
    weights = {name: RNG.normal(size=(8, *shape)).astype(np.float32) for name, shape in
               (("gate", (6, 5)), ("up", (6, 5)), ("down", (5, 6)))}  # fmt: skip
    read = []

    def experts(weights, inputs):
        read.append(len(weights["up"]))
        return llama.swiglu(weights, inputs, "egcd,edf->egcf", "egcf,efd->egcd")

    options = {"experts": experts, "active": active, "group_size": 1, "capacity_factor": 1.25}
    mixture = jax.jit(partial(moe.mixture, **options))
    at_once = mixture(x, router, weights=weights)[0]
    in_pairs = [mixture(x[:, at : at + 2], router, weights=weights)[0] for at in range(0, 8, 2)]
    np.testing.assert_allclose(np.concatenate(in_pairs, axis=1), at_once, rtol=1e-5, atol=1e-5)
    assert read == [8, 2 * active]
