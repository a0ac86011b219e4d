"""What the programs of all frameworks share: sizes, batches, attention, experts and the loss."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

ROWS, LENGTH, WIDTH, HIDDEN, WORDS, LAYERS = 16, 4, 8, 16, 16, 4
EXPERTS, CHOSEN = 4, 2
PIXELS, COLOURS = 6, 2
DROPPED = 0.25


def batch_of(program: str) -> Any:
    """An example: tokens and those that follow, or images and their kinds."""
    draw = np.random.default_rng(0)
    if program == "convolution":
        images = draw.normal(size=(ROWS, PIXELS, PIXELS, COLOURS)).astype(np.float32)
        return {"x": images, "y": draw.integers(0, WORDS, ROWS).astype(np.int32)}
    tokens = {name: draw.integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32) for name in ("x", "y")}
    return tokens | {"target": np.roll(tokens["y"], 1, axis=1)}


def error(logits: Any, batch: Any) -> Any:
    """The mean cross-entropy, in float32 as everybody has it."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"]).mean()


def attend(q: Any, k: Any, v: Any) -> Any:
    """Attention with one head, over dims (…, time, width)."""
    scores = (q @ jnp.swapaxes(k, -1, -2)).astype(jnp.float32) / q.shape[-1] ** 0.5
    return jax.nn.softmax(scores).astype(v.dtype) @ v


def experts(program: str, x: Any, router: Any, up: Any, down: Any) -> Any:
    """A mixture of experts with the two best of four for each token, by one-hot products or by `ragged_dot`."""
    tokens = x.reshape(-1, x.shape[-1])
    shares = jax.nn.softmax((tokens @ router).astype(jnp.float32))
    weights, chosen = lax.top_k(shares, CHOSEN)
    weights = (weights / weights.sum(-1, keepdims=True)).astype(x.dtype)
    mixed = _one_hot if program == "MoE one-hot" else _ragged
    return mixed(tokens, weights, chosen, up, down).reshape(x.shape)


def _one_hot(tokens: Any, weights: Any, chosen: Any, up: Any, down: Any) -> Any:
    sent = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(chosen, EXPERTS, dtype=tokens.dtype))
    hidden = jax.nn.gelu(jnp.einsum("td,edf->tef", tokens, up))
    return jnp.einsum("tef,efd,te->td", hidden, down, sent)


def _ragged(tokens: Any, weights: Any, chosen: Any, up: Any, down: Any) -> Any:
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
    hidden = jax.nn.gelu(lax.ragged_dot(tokens[order // CHOSEN], up, sizes))
    made = lax.ragged_dot(hidden, down, sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(tokens).at[order // CHOSEN].add(made)
