"""Llama 2, 3 and 3.1: RMS norm, rotary positions, grouped-query attention, SwiGLU, untied head.

Shapes in comments: B batch, S sequence, D hidden, N heads, K key-value heads, H head dim, F feed-forward, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.zoo.attention import attend
from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import Array, PyTree, init_stack, project, rms_norm, run_stack, sample_tokens
from meshwright.zoo.losses import mean_token_loss


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The fields that Llama and the decoders after it share; `rope_theta` is the base of the rotary wavelengths."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    rope_theta: float
    dtype: str = "bfloat16"
    scan: bool = False
    checkpoint: str = "none"
    attention: str | None = None
    loss_chunks: int | None = None


@dataclass(frozen=True, kw_only=True)
class Config(Decoder):
    """The shape of one Llama."""

    rope_theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters."""
    return init_model(config, key, partial(_init_layer, config))


def init_model(config: Any, key: Array, init_layer: Callable[[Array], PyTree]) -> PyTree:
    """Returns the parameters of any model with Llama's embedding, norm and head around its layers."""
    embed_key, head_key, layers_key = split(key, 3)
    return {
        "embed": normal(embed_key, config.vocab, config.hidden),
        "layers": init_stack(init_layer, layers_key, config.layers, scan=config.scan),
        "norm": jnp.ones(config.hidden),
        "head": normal(head_key, config.vocab, config.hidden),
    }


def _init_layer(config: Config, key: Array) -> PyTree:
    d, f = config.hidden, config.ffn
    keys = split(key, 4)
    return {
        "attn_norm": jnp.ones(d),
        **init_attention(keys[0], d, config.heads, config.kv_heads, config.head_dim),
        "mlp_norm": jnp.ones(d),
        **init_swiglu(keys[1:], d=d, ffn=f),
    }


def init_attention(key: Array, d: int, heads: int, kv_heads: int, head_dim: int) -> PyTree:
    """Returns the four projections of grouped-query attention, with heads as a dim of their own."""
    keys = split(key, 4)
    return {
        "q": normal(keys[0], d, heads, head_dim),
        "k": normal(keys[1], d, kv_heads, head_dim),
        "v": normal(keys[2], d, kv_heads, head_dim),
        "o": normal(keys[3], heads, head_dim, d),
    }


def init_swiglu(keys: Array, *experts: int, d: int, ffn: int) -> PyTree:
    """Returns the three projections of a gated feed-forward, with a leading dim where there are several of them."""
    return {
        "gate": normal(keys[0], *experts, d, ffn),
        "up": normal(keys[1], *experts, d, ffn),
        "down": normal(keys[2], *experts, ffn, d),
    }


def loss(config: Config, params: PyTree, batch: PyTree) -> Array:
    """Mean cross entropy of the next token."""
    x = params["embed"][batch["tokens"]].astype(config.dtype)  # B S D
    rotation = make_rotation(x.shape[1], config.head_dim, config.rope_theta)
    x = run_stack(partial(_layer, config, rotation), params["layers"], x, checkpoint=config.checkpoint)
    return next_token_loss(params, rms_norm(x, params["norm"]), batch["labels"], config.loss_chunks)


def next_token_loss(params: PyTree, x: Array, labels: Array, chunks: int | None) -> Array:
    """Mean cross entropy of the next token, after the last norm; a model without a head uses its embedding again."""
    return mean_token_loss(params.get("head", params["embed"]), x, labels, chunks)


def _layer(config: Config, rotation: PyTree, weights: PyTree, x: Array) -> Array:
    x = x + attention(weights, rms_norm(x, weights["attn_norm"]), rotation, kind=config.attention)
    return x + mlp(weights, rms_norm(x, weights["mlp_norm"]))


@jax.named_scope("attention")
def attention(weights: PyTree, x: Array, rotation: PyTree, **options: Any) -> Array:
    """Causal grouped-query attention with rotary positions, and norms of queries and keys where there are any.

    Args:
        weights: The projections; `"q_norm"` and `"k_norm"` where the model has them.
        x: Activations, B S D, after the norm.
        rotation: What `make_rotation` returns.
        **options: Other options of `attend`.
    """
    q, k, v = (project("bsd,dnh->bsnh", x, weights[name]) for name in "qkv")
    if "q_norm" in weights:
        q, k = rms_norm(q, weights["q_norm"]), rms_norm(k, weights["k_norm"])
    mixed = attend(rotate(q, rotation), rotate(k, rotation), v, causal=True, **options)
    return project("bsnh,nhd->bsd", mixed, weights["o"])


@jax.named_scope("mlp")
def mlp(weights: PyTree, x: Array) -> Array:
    """The feed-forward half, B S D to B S D; the caller applies the norm."""
    return swiglu(weights, x, "bsd,df->bsf", "bsf,fd->bsd")


def swiglu(weights: PyTree, x: Array, into: str, out: str) -> Array:
    """The gated feed-forward (https://arxiv.org/abs/2002.05202); the einsums say which dims it has."""
    gate = project(into, x, weights["gate"])
    up = project(into, x, weights["up"])
    return project(out, jax.nn.silu(gate) * up, weights["down"])


def make_rotation(seq: int, head_dim: int, theta: float) -> PyTree:
    """Returns cosine and sine of the angle of each position and pair, both (seq, 1, head_dim / 2)."""
    half = head_dim // 2
    angles = jnp.arange(seq)[:, None, None] * theta ** (-jnp.arange(half) / half)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, rotation: PyTree) -> Array:
    """Rotates each pair (i, i + H/2) of every head by its angle (https://arxiv.org/abs/2104.09864)."""
    cos, sin = rotation
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def sample(config: Config, key: Array, batch: int, seq: int) -> PyTree:
    """Returns a batch of random tokens."""
    return sample_tokens(key, batch, seq, config.vocab)
