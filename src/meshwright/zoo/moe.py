"""Mixture of experts as GShard computes it: the best few of them, in buffers of fixed capacity, by one-hot einsums.

Shapes in comments: G groups of tokens, S tokens of a group, E experts, C slots of an expert's buffer, D hidden.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.zoo.layers import Array, Weight


@jax.named_scope("moe")
def mixture(
    x: Array,
    router: Array,
    experts: Callable[[Mapping[str, Any], Array], Array],
    weights: Mapping[str, Any],
    *,
    group_size: int,
    capacity_factor: float,
    active: int = 2,
    gate: Callable[[Array], Array] = jax.nn.softmax,
    bias: Array | None = None,
) -> tuple[Array, Array]:
    """Sends each token to its best experts and mixes what they return, weighted by their gates' shares.

    Args:
        x: Activations, (batch, seq, hidden).
        router: Weights that score the experts, (hidden, experts).
        experts: All experts at once with their weights, E G C D to E G C D.
        weights: The weights of the experts, each with experts as its first dim.
        group_size: Tokens that compete for the same buffers; lowered to a divisor of batch x seq. With 1 no token is
            dropped, and where there are fewer tokens than choose all experts only those that are chosen are read.
        capacity_factor: Slots per expert and group, relative to a perfectly even load.
        active: How many experts serve each token.
        gate: Turns the scores of a token's experts into gates.
        bias: What is added to the scores, (experts,).

    Returns:
        The mixed activations, and the auxiliary loss that is 1 for an even load and more otherwise.
    """
    batch, seq, hidden = x.shape
    group_size = math.gcd(group_size, batch * seq)
    tokens = x.reshape(-1, group_size, hidden)  # G S D
    scores = jnp.einsum("gsd,de->gse", tokens.astype(jnp.float32), router)
    gates = gate(scores if bias is None else scores + bias)
    capacity = max(1, int(capacity_factor * active * group_size / router.shape[1]))
    combine, aux = top2_combine(gates, capacity) if active == 2 else top_combine(gates, active, capacity)
    if group_size == 1 and len(tokens) * active < router.shape[1] and not _has_own_products(weights):
        return _of_chosen(tokens[:, 0], combine, experts, weights, active).reshape(x.shape), aux
    dispatch = (combine > 0).astype(x.dtype)
    inputs = jnp.einsum("gsec,gsd->egcd", dispatch, tokens)
    outputs = experts(weights, inputs)
    mixed = jnp.einsum("gsec,egcd->gsd", combine.astype(x.dtype), outputs)
    return mixed.reshape(x.shape), aux


def _has_own_products(weights: Mapping[str, Any]) -> bool:
    return any(isinstance(weight, Weight) for weight in weights.values())


def _of_chosen(
    tokens: Array, combine: Array, experts: Callable[..., Array], weights: Mapping[str, Any], active: int
) -> Array:
    """The mixture of a few tokens, each a group: every choice of a token is an expert of its own, with one token."""
    shares, chosen = jax.lax.top_k(combine[:, 0, :, 0], active)  # G A
    picked = {name: weight[chosen.reshape(-1)] for name, weight in weights.items()}
    outputs = experts(picked, jnp.repeat(tokens, active, axis=0)[:, None, None])  # GA 1 1 D
    return jnp.einsum("ga,gad->gd", shares.astype(tokens.dtype), outputs.reshape(*shares.shape, -1))


def top2_combine(gates: Array, capacity: int) -> tuple[Array, Array]:
    """Algorithm 1 of GShard (https://arxiv.org/abs/2006.16668), without its random skipping of the second expert.

    Returns:
        The weight of each token in each slot of each expert, G S E C: zero for tokens that found the buffer full;
        and the auxiliary loss.
    """
    num_experts = gates.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), num_experts)  # G S E
    second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), axis=-1), num_experts)
    # Earlier tokens are served first, and all first choices before any second choice.
    before_first = jnp.cumsum(first, axis=1) - first
    before_second = jnp.cumsum(second, axis=1) - second + jnp.sum(first, axis=1, keepdims=True)
    gate_first, gate_second = jnp.sum(gates * first, axis=-1), jnp.sum(gates * second, axis=-1)  # G S
    total = gate_first + gate_second
    combine = _place(gate_first / total, first, before_first, capacity)
    combine += _place(gate_second / total, second, before_second, capacity)
    aux = num_experts * jnp.mean(jnp.sum(jnp.mean(first, axis=1) * jnp.mean(gates, axis=1), axis=-1))
    return combine, aux


def top_combine(gates: Array, active: int, capacity: int) -> tuple[Array, Array]:
    """As `top2_combine`, for any number of experts; A numbers the choices of a token, best first."""
    num_experts = gates.shape[-1]
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(gates), active)
    choice = jax.nn.one_hot(jnp.moveaxis(chosen, 2, 1), num_experts)  # G A S E
    earlier = jnp.cumsum(jnp.sum(choice, axis=2), axis=1) - jnp.sum(choice, axis=2)  # G A E: in all better choices
    before = jnp.cumsum(choice, axis=2) - choice + earlier[:, :, None]
    picked = jnp.einsum("gse,gase->gas", gates, choice)
    shares = picked / jnp.sum(picked, axis=1, keepdims=True)
    position = jnp.sum(before * choice, axis=-1).astype(jnp.int32)  # G A S
    slot = jax.nn.one_hot(position, capacity)  # G A S C; a position past the end of the buffer gives zeros
    combine = jnp.einsum("gase,gasc->gsec", shares[..., None] * choice, slot)
    even = gates / jnp.sum(gates, axis=-1, keepdims=True)
    load = jnp.mean(jnp.sum(choice, axis=1), axis=1) / active  # G E
    return combine, num_experts * jnp.mean(jnp.sum(load * jnp.mean(even, axis=1), axis=-1))


def _place(gate: Array, choice: Array, before: Array, capacity: int) -> Array:
    position = jnp.sum(before * choice, axis=-1).astype(jnp.int32)  # G S
    slot = jax.nn.one_hot(position, capacity)  # G S C; a position past the end of the buffer gives zeros
    return gate[..., None, None] * choice[..., None] * slot[:, :, None, :]
