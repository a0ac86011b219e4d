"""Gemma 3: norms before and after each half, sliding windows on all but every sixth layer, GeGLU, tied embeddings."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from meshwright.zoo import llama
from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import Array, PyTree, init_stack, project, rms_norm, run_stack, sample_tokens


@dataclass(frozen=True, kw_only=True)
class Config(llama.Decoder):
    """The shape of one Gemma 3; one layer in `period`, the last of them, looks at the whole sequence."""

    head_dim: int
    window: int
    query_width: int  # scores are divided by the root of it
    period: int = 6
    rope_theta: float = 1_000_000.0
    local_rope_theta: float = 10_000.0


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters; scales of norms are kept as their difference from 1, as in the release."""
    embed_key, layers_key = split(key)
    return {
        "embed": normal(embed_key, config.vocab, config.hidden),
        "layers": init_stack(partial(_init_layer, config), layers_key, config.layers, scan=config.scan),
        "norm": jnp.zeros(config.hidden),
    }


def _init_layer(config: Config, key: Array) -> PyTree:
    d = config.hidden
    attention_key, mlp_key = split(key)
    norms = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
    return {
        **{name: jnp.zeros(d) for name in norms},
        **{name: jnp.zeros(config.head_dim) for name in ("q_norm", "k_norm")},
        **llama.init_attention(attention_key, d, config.heads, config.kv_heads, config.head_dim),
        **llama.init_swiglu(split(mlp_key, 3), d=d, ffn=config.ffn),
    }


def loss(config: Config, params: PyTree, batch: PyTree) -> Array:
    """Mean cross entropy of the next token."""
    x = params["embed"][batch["tokens"]].astype(config.dtype) * config.hidden**0.5  # B S D
    near, far = (
        llama.make_rotation(x.shape[1], config.head_dim, theta)
        for theta in (config.local_rope_theta, config.rope_theta)
    )
    local = partial(_layer, config, near, config.window)
    layers = (*(local,) * (config.period - 1), partial(_layer, config, far, None))
    x = run_stack(layers, params["layers"], x, checkpoint=config.checkpoint)
    return llama.next_token_loss(params, _norm(x, params["norm"]), batch["labels"], config.loss_chunks)


def _layer(config: Config, rotation: PyTree, window: int | None, weights: PyTree, x: Array) -> Array:
    options = {"kind": config.attention, "window": window, "scale": config.query_width**-0.5}
    scaled = weights | {name: 1 + weights[name] for name in ("q_norm", "k_norm")}
    mixed = llama.attention(scaled, _norm(x, weights["attn_norm"]), rotation, **options)
    x = x + _norm(mixed, weights["attn_out_norm"])
    return x + _norm(_mlp(weights, _norm(x, weights["mlp_norm"])), weights["mlp_out_norm"])


@jax.named_scope("mlp")
def _mlp(weights: PyTree, x: Array) -> Array:
    gate, up = (project("bsd,df->bsf", x, weights[name]) for name in ("gate", "up"))
    return project("bsf,fd->bsd", jax.nn.gelu(gate) * up, weights["down"])


def _norm(x: Array, scale: Array) -> Array:
    return rms_norm(x, 1 + scale, epsilon=1e-6)


def sample(config: Config, key: Array, batch: int, seq: int) -> PyTree:
    """Returns a batch of random tokens."""
    return sample_tokens(key, batch, seq, config.vocab)
