"""Cases of fused attention, with a plain attention in the kernel's place: the kernels run only on GPUs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..contract import Case
from . import Builder, Sizes

PARAMS: dict[str, Any] = {
    "layout": 0,
    "dropout_rate": 0.0,
    "mask_type": "MaskType.CAUSAL",
    "variadic_args": (False, False),
}
EMPTY = np.zeros((0,), np.float32)


def _scores(query: jax.Array, key: jax.Array, bias: Any) -> jax.Array:
    """Scores ``[batch, head, query token, token]`` of arrays ``[batch, token, head, width]``, masked causally."""
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", query, key) + (bias if bias.ndim == 4 else 0)
    return jnp.where(jnp.tri(*scores.shape[2:], dtype=bool), scores, -1e9)


@partial(jax.jit, static_argnames="heads_first")
def _forward(query, key, value, bias, *_, heads_first: bool = False):
    if heads_first:
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    scores = _scores(query, key, bias)
    value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    output = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value)
    return [jnp.swapaxes(output, 1, 2) if heads_first else output, jax.nn.logsumexp(scores, -1)]


@jax.jit
def _backward(query, key, value, bias, q_len, kv_len, q_at, kv_at, pages_k, pages_v, stat, output, cotangent):
    pull = jax.vjp(lambda *qkv: _forward(*qkv, bias)[0], query, key, value)[1]
    return list(pull(cotangent))


def _inputs(size: Sizes, shared: int, bias: np.ndarray = EMPTY) -> list[np.ndarray]:
    b, t, s, g, d, v = 2, 3, 3, 2, 2, 3
    arrays = [size.unit(b, t, g * shared, d), size.unit(b, s, g, d), size.unit(b, s, g, v), bias]
    return [*arrays, np.full(b, t, np.int32), *[EMPTY] * 5]


def plain_heads(size: Sizes) -> Case:
    return Case(_forward, _inputs(size, 1, bias=size.unit(1, 2, 3, 3)), params=PARAMS)


def shared_heads(size: Sizes) -> Case:
    return Case(_forward, _inputs(size, 2), params=PARAMS)


def heads_before_tokens(size: Sizes) -> Case:
    operands = _inputs(size, 1)
    operands[:3] = [np.swapaxes(x, 1, 2) for x in operands[:3]]
    return Case(partial(_forward, heads_first=True), operands, params=PARAMS | {"layout": 1})


def gradient_of_shared_heads(size: Sizes) -> Case:
    operands = _inputs(size, 2)
    output, stat = (np.asarray(result) for result in _forward(*operands))
    return Case(_backward, [*operands, stat, output, size.floats(*output.shape)], params=PARAMS)


CASES: list[tuple[str, Builder]] = [("dot_product_attention_bwd_wrapper", gradient_of_shared_heads)]

ALIKE: list[tuple[str, Builder]] = [
    ("dot_product_attention_fwd_wrapper", plain_heads),
    ("dot_product_attention_fwd_wrapper", shared_heads),
    ("dot_product_attention_fwd_wrapper", heads_before_tokens),
]
