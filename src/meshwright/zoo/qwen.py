"""Qwen 3: a Llama that norms queries and keys, with heads of a size of their own; the larger ones have experts.

A layer's feed-forward is one SwiGLU, or the `active` best of many small ones, in buffers of fixed capacity (`moe.py`).
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
class Config(llama.Decoder):
    """The shape of one Qwen 3; `ffn` is the inner width of each expert where there are several."""

    head_dim: int
    tied: bool = False
    experts: int = 0
    active: int = 8
    group_size: int = 256
    rope_theta: float = 1_000_000.0
    capacity_factor: float = 1.25
    aux_weight: float = 0.001


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters."""
    return llama.init_model(config, key, partial(_init_layer, config))


def _init_layer(config: Config, key: Array) -> PyTree:
    d, experts = config.hidden, (config.experts,) if config.experts else ()
    keys = split(key, 5)
    router = {"router": normal(keys[4], d, config.experts)} if config.experts else {}
    return {
        "attn_norm": jnp.ones(d),
        **llama.init_attention(keys[0], d, config.heads, config.kv_heads, config.head_dim),
        "q_norm": jnp.ones(config.head_dim),
        "k_norm": jnp.ones(config.head_dim),
        "mlp_norm": jnp.ones(d),
        **router,
        **llama.init_swiglu(split(keys[1], 3), *experts, d=d, ffn=config.ffn),
    }
