"""The classic transformer, with biases, layer norms and GELU: what GPT, BERT, ViT and GShard share.

Shapes in comments: B batch, S sequence, D hidden, N heads, H head dim, F feed-forward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.zoo.attention import Mix, attend
from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import Array, PyTree, init_layer_norm, layer_norm, project
from meshwright.zoo.losses import mean_token_loss

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "exact_gelu": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}


def init_attention(key: Array, d: int, heads: int, kv_heads: int | None = None) -> PyTree:
    """Returns the norm, projections and biases of attention, with heads as a dim of their own.

    Fewer heads of keys and values than of queries are each shared by a group of these.
    """
    head_dim, shared = d // heads, kv_heads or heads
    keys = split(key, 4)
    weights: dict[str, Any] = {"attn_norm": init_layer_norm(d)}
    for name, k, count in zip("qkv", keys, (heads, shared, shared), strict=False):
        weights[name] = normal(k, d, count, head_dim)
        weights[f"{name}_bias"] = jnp.zeros((count, head_dim))
    return weights | {"o": normal(keys[3], heads, head_dim, d), "o_bias": jnp.zeros(d)}


def init_mlp(key: Array, d: int, ffn: int) -> PyTree:
    """Returns the norm, weights and biases of the feed-forward half."""
    up_key, down_key = split(key)
    return {
        "mlp_norm": init_layer_norm(d),
        "up": normal(up_key, d, ffn),
        "up_bias": jnp.zeros(ffn),
        "down": normal(down_key, ffn, d),
        "down_bias": jnp.zeros(d),
    }


def init_layer(key: Array, d: int, heads: int, ffn: int, kv_heads: int | None = None) -> PyTree:
    """Returns the weights of one whole layer."""
    attention_key, mlp_key = split(key)
    return init_attention(attention_key, d, heads, kv_heads) | init_mlp(mlp_key, d, ffn)


def embed(params: PyTree, tokens: Array, first: int = 0, positions: Array | None = None) -> Array:
    """Adds the embeddings of tokens and of their positions, if these are learned, B S to B S D.

    Position 0 is row `first` of the table; `positions` are those of the tokens, (S,), or None for 0, 1, 2 and so on.
    """
    x = params["embed"][tokens]
    if "positions" not in params:
        return x
    rows = slice(first, first + tokens.shape[1]) if positions is None else first + positions
    return x + params["positions"][rows]


def pre_norm_layer(weights: PyTree, x: Array, *, causal: bool, kind: str | None) -> Array:
    """A whole layer, B S D to B S D, each half with its norm before it."""
    x = x + attention(weights, layer_norm(x, weights["attn_norm"]), causal=causal, kind=kind)
    return x + mlp(weights, layer_norm(x, weights["mlp_norm"]))


@jax.named_scope("attention")
def attention(weights: PyTree, x: Array, *, causal: bool, kind: str | None, mix: Mix = attend) -> Array:
    """Multi-head attention of a `kind` of `zoo.attention`, B S D to B S D; the caller applies the norm."""
    q, k, v = (project("bsd,dnh->bsnh", x, weights[name], weights[f"{name}_bias"]) for name in "qkv")
    mixed = mix(q, k, v, causal=causal, kind=kind)
    return project("bsnh,nhd->bsd", mixed, weights["o"], weights["o_bias"])


@jax.named_scope("mlp")
def mlp(weights: PyTree, x: Array, activation: str = "gelu") -> Array:
    """The feed-forward half, B S D to B S D; the caller applies the norm."""
    x = ACTIVATIONS[activation](project("bsd,df->bsf", x, weights["up"], weights["up_bias"]))
    return project("bsf,fd->bsd", x, weights["down"], weights["down_bias"])


def next_token_loss(params: PyTree, x: Array, labels: Array, chunks: int | None) -> Array:
    """Mean cross entropy of the next token, with the embedding used again as the head; `chunks` as in `zoo.losses`."""
    return mean_token_loss(params["embed"], layer_norm(x, params["norm"]), labels, chunks)
