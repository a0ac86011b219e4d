"""GShard's mixture of experts as a language model: GPT layers, every other one with experts for its feed-forward."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from meshwright.zoo import transformer
from meshwright.zoo.catalogue import ZooError
from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import (
    Array,
    PyTree,
    init_layer_norm,
    init_stack,
    layer_norm,
    project,
    run_stack,
)
from meshwright.zoo.llama import sample
from meshwright.zoo.moe import mixture

__all__ = ["Config", "init", "loss", "sample"]


@dataclass(frozen=True)
class Config:
    """The shape of one GShard model; `layers` counts layers with and without experts, so it is even."""

    vocab: int
    positions: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    experts: int
    group_size: int
    capacity_factor: float = 1.0
    aux_weight: float = 0.01
    dtype: str = "bfloat16"
    scan: bool = False
    checkpoint: str = "none"
    attention: str | None = None
    loss_chunks: int | None = None

    def __post_init__(self) -> None:
        if self.layers % 2:
            raise ZooError(f"layers={self.layers} must be even: every other layer has experts.")


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters; unrolled layers alternate, scanned ones are stacked in pairs."""
    embed_key, positions_key, layers_key = split(key, 3)
    pairs = init_stack(partial(_init_pair, config), layers_key, config.layers // 2, scan=config.scan)
    return {
        "embed": normal(embed_key, config.vocab, config.hidden),
        "positions": normal(positions_key, config.positions, config.hidden),
        "layers": pairs if config.scan else [pair[kind] for pair in pairs for kind in ("experts", "dense")],
        "norm": init_layer_norm(config.hidden),
    }


def _init_pair(config: Config, key: Array) -> PyTree:
    d, e, f = config.hidden, config.experts, config.ffn
    keys = split(key, 5)
    experts = {
        "mlp_norm": init_layer_norm(d),
        "router": normal(keys[1], d, e),
        "up": normal(keys[2], e, d, f),
        "down": normal(keys[3], e, f, d),
    }
    return {
        "experts": transformer.init_attention(keys[0], d, config.heads) | experts,
        "dense": transformer.init_layer(keys[4], d, config.heads, f),
    }


def loss(config: Config, params: PyTree, batch: PyTree) -> Array:
    """Mean cross entropy of the next token, plus the mean auxiliary loss of the routers."""
    x = transformer.embed(params, batch["tokens"]).astype(config.dtype)  # B S D
    layer = partial(_pair if config.scan else _layer, config)
    x, aux = run_stack(layer, params["layers"], (x, jnp.float32(0)), checkpoint=config.checkpoint)
    loss = transformer.next_token_loss(params, x, batch["labels"], config.loss_chunks)
    return loss + config.aux_weight * aux / (config.layers // 2)


def _pair(config: Config, weights: PyTree, carry: PyTree) -> PyTree:
    return _layer(config, weights["dense"], _layer(config, weights["experts"], carry))


def _layer(config: Config, weights: PyTree, carry: PyTree) -> PyTree:
    x, aux = carry
    if "router" not in weights:
        return transformer.pre_norm_layer(weights, x, causal=True, kind=config.attention), aux
    normed = layer_norm(x, weights["attn_norm"])
    x = x + transformer.attention(weights, normed, causal=True, kind=config.attention)
    y, layer_aux = mixture(
        layer_norm(x, weights["mlp_norm"]),
        weights["router"],
        _experts,
        {name: weights[name] for name in ("up", "down")},
        group_size=config.group_size,
        capacity_factor=config.capacity_factor,
    )
    return x + y, aux + layer_aux


def _experts(weights: PyTree, x: Array) -> Array:
    x = jax.nn.relu(project("egcd,edf->egcf", x, weights["up"]))
    return project("egcf,efd->egcd", x, weights["down"])
