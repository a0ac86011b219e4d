"""DeepSeek-V3: multi-head latent attention, and many small experts beside one that every token passes.

Keys and values are made from a narrow latent, and positions enter by a part of each head that all keys share. Experts
have buffers of fixed capacity (`moe.py`); the release drops no token, restricts each token to some hosts' experts,
balances them by a bias that it learns without gradients, and predicts a second token: none of it is here.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from meshwright.zoo import llama
from meshwright.zoo.attention import attend
from meshwright.zoo.catalogue import ZooError
from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import Array, PyTree, init_stack, project, rms_norm, run_stack
from meshwright.zoo.llama import sample
from meshwright.zoo.rotary import make_rotation, rotate

__all__ = ["Config", "init", "loss", "sample"]


@dataclass(frozen=True)
class Config:
    """The shape of one DeepSeek-V3; the first `dense_layers` of the `layers` have no experts."""

    vocab: int
    hidden: int
    layers: int
    dense_layers: int
    heads: int
    query_rank: int
    kv_rank: int
    plain_dim: int  # of a head, without positions
    rotated_dim: int
    value_dim: int
    ffn: int
    expert_ffn: int
    experts: int
    active: int
    group_size: int
    rope_theta: float = 10_000.0
    routed_scale: float = 2.5
    capacity_factor: float = 1.25
    aux_weight: float = 0.0001
    dtype: str = "bfloat16"
    scan: bool = False
    checkpoint: str = "none"
    attention: str | None = None
    loss_chunks: int | None = None

    def __post_init__(self) -> None:
        if self.layers <= self.dense_layers:
            raise ZooError(
                f"layers={self.layers} must be above dense_layers={self.dense_layers}: no layer has experts."
            )


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters; layers without experts are a list of their own."""
    d = config.hidden
    keys = split(key, 4)
    counts = config.dense_layers, config.layers - config.dense_layers
    return {
        "embed": normal(keys[0], config.vocab, d),
        "dense_layers": init_stack(partial(_init_dense, config), keys[1], counts[0], scan=False),
        "layers": init_stack(partial(_init_experts, config), keys[2], counts[1], scan=config.scan),
        "norm": jnp.ones(d),
        "head": normal(keys[3], config.vocab, d),
    }


def _init_dense(config: Config, key: Array) -> PyTree:
    attention_key, mlp_key = split(key)
    mlp = llama.init_swiglu(split(mlp_key, 3), d=config.hidden, ffn=config.ffn)
    return _init_attention(config, attention_key) | mlp


def _init_experts(config: Config, key: Array) -> PyTree:
    attention_key, router_key, experts_key, shared_key = split(key, 4)
    d, f = config.hidden, config.expert_ffn
    return {
        **_init_attention(config, attention_key),
        "router": normal(router_key, d, config.experts),
        **llama.init_swiglu(split(experts_key, 3), config.experts, d=d, ffn=f),
        "shared": llama.init_swiglu(split(shared_key, 3), d=d, ffn=f),
    }


def _init_attention(config: Config, key: Array) -> PyTree:
    d, n, q, kv = config.hidden, config.heads, config.query_rank, config.kv_rank
    keys = split(key, 8)
    return {
        "attn_norm": jnp.ones(d),
        "q_down": normal(keys[0], d, q),
        "q_norm": jnp.ones(q),
        "q_plain": normal(keys[1], q, n, config.plain_dim),
        "q_rotated": normal(keys[2], q, n, config.rotated_dim),
        "kv_down": normal(keys[3], d, kv),
        "kv_norm": jnp.ones(kv),
        "k_plain": normal(keys[4], kv, n, config.plain_dim),
        "k_rotated": normal(keys[5], d, config.rotated_dim),
        "v": normal(keys[6], kv, n, config.value_dim),
        "o": normal(keys[7], n, config.value_dim, d),
        "mlp_norm": jnp.ones(d),
    }


def loss(config: Config, params: PyTree, batch: PyTree) -> Array:
    """Mean cross entropy of the next token, plus the mean auxiliary loss of the routers."""
    x = params["embed"][batch["tokens"]].astype(config.dtype)  # B S D
    rotation = make_rotation(x.shape[1], config.rotated_dim, config.rope_theta)
    x = run_stack(partial(_dense, config, rotation), params["dense_layers"], x, checkpoint=config.checkpoint)
    layer = partial(_experts, config, rotation)
    x, aux = run_stack(layer, params["layers"], (x, jnp.float32(0)), checkpoint=config.checkpoint)
    loss = llama.next_token_loss(params, rms_norm(x, params["norm"]), batch["labels"], config.loss_chunks)
    return loss + config.aux_weight * aux / (config.layers - config.dense_layers)


def _dense(config: Config, rotation: PyTree, weights: PyTree, x: Array) -> Array:
    x = x + _attention(config, weights, rms_norm(x, weights["attn_norm"]), rotation)
    return x + llama.mlp(weights, rms_norm(x, weights["mlp_norm"]))


def _experts(config: Config, rotation: PyTree, weights: PyTree, carry: PyTree) -> PyTree:
    x, aux = carry
    x = x + _attention(config, weights, rms_norm(x, weights["attn_norm"]), rotation)
    normed = rms_norm(x, weights["mlp_norm"])
    experts = partial(llama.swiglu, into="egcd,edf->egcf", out="egcf,efd->egcd")
    y, layer_aux = llama.mix_experts(config, weights, normed, experts, gate=jax.nn.sigmoid)
    return x + config.routed_scale * y + llama.mlp(weights["shared"], normed), aux + layer_aux


@jax.named_scope("attention")
def _attention(config: Config, weights: PyTree, x: Array, rotation: PyTree) -> Array:
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1), as it is trained."""
    narrow = rms_norm(project("bsd,dr->bsr", x, weights["q_down"]), weights["q_norm"])
    latent = rms_norm(project("bsd,dr->bsr", x, weights["kv_down"]), weights["kv_norm"])
    plain, turned = (project("bsr,rnh->bsnh", narrow, weights[name]) for name in ("q_plain", "q_rotated"))
    q = jnp.concatenate([plain, rotate(turned, rotation)], axis=-1)
    plain, v = (project("bsr,rnh->bsnh", latent, weights[name]) for name in ("k_plain", "v"))
    shared = rotate(project("bsd,dh->bsh", x, weights["k_rotated"])[:, :, None], rotation)
    shared = jnp.broadcast_to(shared, (*plain.shape[:3], config.rotated_dim))
    mixed = attend(q, jnp.concatenate([plain, shared], axis=-1), v, causal=True, kind=config.attention)
    return project("bsnh,nhd->bsd", mixed, weights["o"])
