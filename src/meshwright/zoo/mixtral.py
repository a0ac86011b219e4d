"""Mixtral: a Llama whose every feed-forward is a mixture of SwiGLU experts, two of which serve each token.

The published model drops no token; this one has GShard's fixed buffers, a quarter larger than an even load needs.
With `group_size=1` no token is dropped either: each has buffers of its own, and every expert computes each token.
"""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp

from meshwright.zoo import llama
from meshwright.zoo.attention import Mix, attend
from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import Array, PyTree, rms_norm, run_stack, sample_tokens
from meshwright.zoo.moe import mixture
from meshwright.zoo.rotary import make_rotation


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
    layer = partial(_layer, config, rotation, mix)
    x, aux = run_stack(layer, params["layers"], (x, jnp.float32(0)), checkpoint=config.checkpoint)
    return rms_norm(x, params["norm"], config.epsilon), aux


def _layer(config: Config, rotation: PyTree, mix: Mix, weights: PyTree, carry: PyTree) -> PyTree:
    x, aux = carry
    normed = rms_norm(x, weights["attn_norm"], config.epsilon)
    x = x + llama.attention(config, weights, normed, rotation, mix, window=config.window)
    y, layer_aux = mixture(
        rms_norm(x, weights["mlp_norm"], config.epsilon),
        weights["router"],
        partial(llama.swiglu, into="egcd,edf->egcf", out="egcf,efd->egcd"),
        {name: weights[name] for name in ("gate", "up", "down")},
        active=config.active,
        group_size=config.group_size,
        capacity_factor=config.capacity_factor,
    )
    return x + y, aux + layer_aux


def sample(config: Config, key: Array, batch: int, seq: int) -> PyTree:
    """Returns a batch of random tokens."""
    return sample_tokens(key, batch, seq, config.vocab)
