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


def _scores(query: jax.Array, key: jax.Array, bias: Any, causal: bool) -> jax.Array:
    """Scores ``[batch, head, query token, token]`` of arrays ``[batch, token, head, width]``."""
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", query, key) + (bias if bias.ndim == 4 else 0)
    return jnp.where(jnp.tri(*scores.shape[2:], dtype=bool), scores, -1e9) if causal else scores


@partial(jax.jit, static_argnames=("heads_first", "causal"))
def _forward(query, key, value, bias, *_, heads_first: bool = False, causal: bool = True):
    if heads_first:
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    scores = _scores(query, key, bias, causal)
    value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    output = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value)
    return [jnp.swapaxes(output, 1, 2) if heads_first else output, jax.nn.logsumexp(scores, -1)]


@partial(jax.jit, static_argnames=("causal",))
def _backward(query, key, value, bias, *others, causal: bool = True):
    """Gradients of the first three, and of a bias; the others end with the normaliser, the output and its cotangent."""
    pull = jax.vjp(lambda *args: _forward(*args, causal=causal)[0], query, key, value, bias)[1]
    return list(pull(others[-1]))[: 4 if bias.ndim == 4 else 3]


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


def _unmasked(size: Sizes, shared: int, bias: np.ndarray = EMPTY) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The operands and results of a call without a mask, whose queries may be split."""
    operands = _inputs(size, shared, bias)
    operands[0] = size.unit(2, 4, 2 * shared, 2)
    return operands, [np.asarray(result) for result in _forward(*operands, causal=False)]


def unmasked(size: Sizes) -> Case:
    return Case(partial(_forward, causal=False), _unmasked(size, 2)[0], params=PARAMS | NO_MASK)


def gradient_of_shared_bias(size: Sizes) -> Case:
    """The bias is the same for all examples and heads, so that its gradient adds up over both."""
    operands, (output, stat) = _unmasked(size, 1, size.unit(1, 1, 4, 3))
    operands += [stat, output, size.floats(*output.shape)]
    return Case(partial(_backward, causal=False), operands, params=PARAMS | NO_MASK)


NO_MASK = {"mask_type": "MaskType.NO_MASK"}

CASES: list[tuple[str, Builder]] = [
    ("dot_product_attention_bwd_wrapper", gradient_of_shared_heads),
    ("dot_product_attention_bwd_wrapper", gradient_of_shared_bias),
]

ALIKE: list[tuple[str, Builder]] = [
    ("dot_product_attention_fwd_wrapper", unmasked),
    ("dot_product_attention_fwd_wrapper", plain_heads),
    ("dot_product_attention_fwd_wrapper", shared_heads),
    ("dot_product_attention_fwd_wrapper", heads_before_tokens),
]
