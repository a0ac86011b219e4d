"""GPT-OSS: sinks and alternating sliding windows in attention, biases everywhere, four small experts for each token.

cuDNN's kernel knows no sinks, so attention is written out on GPUs; splash attention, on TPUs, does. The models of the
catalogue rotate positions without YaRN's longer wavelengths, and experts have buffers of fixed capacity (`moe.py`);
neither changes a shape. `rope_scaling` and `group_size=1` give the released model exactly.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from meshwright.zoo import llama
from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import Array, PyTree, project
from meshwright.zoo.llama import logits, loss, sample

__all__ = ["Config", "init", "logits", "loss", "sample"]

_LIMIT = 7.0  # of the gated values
_SHARPNESS = 1.702  # of the sigmoid


@dataclass(frozen=True, kw_only=True)
class Config(llama.Decoder):
    """The shape of one GPT-OSS; odd layers, counted from 1, see `window` positions and even ones see all."""

    head_dim: int
    experts: int
    active: int
    window: int
    group_size: int
    tied: bool = False
    rope_theta: float = 150_000.0
    capacity_factor: float = 1.25
    aux_weight: float = 0.9

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.window, None

    def run_experts(self, weights: PyTree, x: Array) -> Array:
        """Each expert on its buffer, E G C D to E G C D."""
        gate, up = (
            project("egcd,edf->egcf", x, weights[name], weights[f"{name}_bias"][:, None, None])
            for name in ("gate", "up")
        )
        gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
        inner = (up + 1) * gate * jax.nn.sigmoid(_SHARPNESS * gate)
        return project("egcf,efd->egcd", inner, weights["down"], weights["down_bias"][:, None, None])


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters."""
    return llama.init_model(config, key, partial(_init_layer, config))


def _init_layer(config: Config, key: Array) -> PyTree:
    d, e, f, h = config.hidden, config.experts, config.ffn, config.head_dim
    keys = split(key, 3)
    return {
        "attn_norm": jnp.ones(d),
        **llama.init_attention(keys[0], d, config.heads, config.kv_heads, h),
        "q_bias": jnp.zeros((config.heads, h)),
        "k_bias": jnp.zeros((config.kv_heads, h)),
        "v_bias": jnp.zeros((config.kv_heads, h)),
        "o_bias": jnp.zeros(d),
        "sinks": jnp.zeros(config.heads),
        "mlp_norm": jnp.ones(d),
        "router": normal(keys[1], d, e),
        "router_bias": jnp.zeros(e),
        **llama.init_swiglu(split(keys[2], 3), e, d=d, ffn=f),
        "gate_bias": jnp.zeros((e, f)),
        "up_bias": jnp.zeros((e, f)),
        "down_bias": jnp.zeros((e, d)),
    }
