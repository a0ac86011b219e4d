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
from meshwright.zoo.attention import Mix, attend
from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import Array, PyTree, project, rms_norm, run_stack, sample_tokens
from meshwright.zoo.moe import mixture
from meshwright.zoo.rotary import make_rotation

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


def loss(config: Config, params: PyTree, batch: PyTree) -> Array:
    """Mean cross entropy of the next token, plus the mean auxiliary loss of the routers."""
    x, aux = _decode(config, params, batch["tokens"], None, attend)
    loss = llama.next_token_loss(params, x, batch["labels"], config.loss_chunks)
    return loss + config.aux_weight * aux / config.layers


def logits(
    config: Config,
    params: PyTree,
    tokens: Array,
    positions: Array | None = None,
    mix: Mix = attend,
    rows: Array | None = None,
) -> Array:
    """The scores of each position's next token, B S to B S V; the other arguments are those of `llama.logits`."""
    return llama.head(params, _decode(config, params, tokens, positions, mix)[0], rows)


def _decode(config: Config, params: PyTree, tokens: Array, positions: Array | None, mix: Mix) -> tuple[Array, Array]:
    """The activations after the last norm, B S to B S D, and the sum of the auxiliary losses."""
    x = params["embed"][tokens].astype(config.dtype)  # B S D
    places = x.shape[1] if positions is None else positions
    rotation = make_rotation(places, config.head_dim, config.rope_theta, config.rope_scaling)
    layers = tuple(partial(_layer, config, rotation, mix, window) for window in (config.window, None))
    x, aux = run_stack(layers, params["layers"], (x, jnp.float32(0)), checkpoint=config.checkpoint)
    return rms_norm(x, params["norm"], config.epsilon), aux


def _layer(config: Config, rotation: PyTree, mix: Mix, window: int | None, weights: PyTree, carry: PyTree) -> PyTree:
    x, aux = carry
    normed = rms_norm(x, weights["attn_norm"], config.epsilon)
    x = x + llama.attention(config, weights, normed, rotation, mix, window=window, sinks=weights["sinks"])
    y, layer_aux = mixture(
        rms_norm(x, weights["mlp_norm"], config.epsilon),
        weights["router"],
        _experts,
        {name: weights[name] for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")},
        bias=weights["router_bias"],
        active=config.active,
        group_size=config.group_size,
        capacity_factor=config.capacity_factor,
    )
    return x + y, aux + layer_aux


def _experts(weights: PyTree, x: Array) -> Array:
    """Each expert on its buffer, E G C D to E G C D."""
    gate, up = (
        project("egcd,edf->egcf", x, weights[name], weights[f"{name}_bias"][:, None, None]) for name in ("gate", "up")
    )
    gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
    inner = (up + 1) * gate * jax.nn.sigmoid(_SHARPNESS * gate)
    return project("egcf,efd->egcd", inner, weights["down"], weights["down_bias"][:, None, None])


def sample(config: Config, key: Array, batch: int, seq: int) -> PyTree:
    """Returns a batch of random tokens."""
    return sample_tokens(key, batch, seq, config.vocab)
