"""Mixtral: a Llama whose every feed-forward is a mixture of SwiGLU experts, two of which serve each token.

The published model drops no token; this one has GShard's fixed buffers, a quarter larger than an even load needs.
With `group_size=1` no token is dropped either: each has buffers of its own, and every expert computes each token.
"""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp

from meshwright.zoo import llama
from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import Array, PyTree
from meshwright.zoo.llama import logits, loss, sample

__all__ = ["Config", "init", "logits", "loss", "sample"]


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """The shape of one Mixtral."""

    experts: int
    active: int = 2
    group_size: int
    rope_theta: float = 1_000_000.0
    capacity_factor: float = 1.25
    aux_weight: float = 0.02


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters."""
    return llama.init_model(config, key, partial(_init_layer, config))


def _init_layer(config: Config, key: Array) -> PyTree:
    d, e, f = config.hidden, config.experts, config.ffn
    keys = split(key, 5)
    return {
        "attn_norm": jnp.ones(d),
        **llama.init_attention(keys[0], d, config.heads, config.kv_heads, config.head_dim),
        "mlp_norm": jnp.ones(d),
        "router": normal(keys[1], d, e),
        **llama.init_swiglu(keys[2:], e, d=d, ffn=f),
    }
