"""BERT: bidirectional post-norm layers trained to restore masked tokens; no next-sentence task, so no segments."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from meshwright.zoo import transformer
from meshwright.zoo.draw import coins, integers, normal, split
from meshwright.zoo.layers import (
    Array,
    PyTree,
    init_layer_norm,
    init_stack,
    layer_norm,
    project,
    run_stack,
)
from meshwright.zoo.losses import cross_entropy

MASKED_FRACTION = 0.15
MASK_TOKEN = 103  # [MASK] in the released vocabularies


@dataclass(frozen=True)
class Config:
    """The shape of one BERT; `positions` is the longest sequence it can read."""

    vocab: int
    positions: int
    hidden: int
    layers: int
    heads: int
    dtype: str = "bfloat16"
    scan: bool = False
    checkpoint: str = "none"
    attention: str | None = None


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters."""
    d = config.hidden
    keys = split(key, 4)
    init_layer = partial(transformer.init_layer, d=d, heads=config.heads, ffn=4 * d)
    return {
        "embed": normal(keys[0], config.vocab, d),
        "positions": normal(keys[1], config.positions, d),
        "embed_norm": init_layer_norm(d),
        "layers": init_stack(init_layer, keys[2], config.layers, scan=config.scan),
        "transform": normal(keys[3], d, d),
        "transform_bias": jnp.zeros(d),
        "norm": init_layer_norm(d),
        "head_bias": jnp.zeros(config.vocab),
    }


def loss(config: Config, params: PyTree, batch: PyTree) -> Array:
    """Mean cross entropy of the masked tokens."""
    masked = batch["masked"]
    x = transformer.embed(params, batch["tokens"])  # B S D
    x = layer_norm(x, params["embed_norm"]).astype(config.dtype)
    x = run_stack(partial(_layer, config), params["layers"], x, checkpoint=config.checkpoint)
    x = jax.nn.gelu(project("bsd,de->bse", x, params["transform"], params["transform_bias"]))
    logits = project("bsd,vd->bsv", layer_norm(x, params["norm"]), params["embed"], params["head_bias"])
    losses = cross_entropy(logits, batch["labels"])
    return jnp.sum(losses * masked) / jnp.maximum(jnp.sum(masked), 1.0)


def _layer(config: Config, weights: PyTree, x: Array) -> Array:
    mixed = transformer.attention(weights, x, causal=False, kind=config.attention)
    x = layer_norm(x + mixed, weights["attn_norm"])
    return layer_norm(x + transformer.mlp(weights, x), weights["mlp_norm"])


def sample(config: Config, key: Array, batch: int, seq: int) -> PyTree:
    """Returns random tokens of which some are masked; `masked` is 1 there and 0 elsewhere."""
    label_key, mask_key = split(key)
    labels = integers(label_key, batch, seq, below=config.vocab)
    masked = coins(mask_key, *labels.shape, chance=MASKED_FRACTION)
    tokens = jnp.where(masked, MASK_TOKEN, labels)
    return {"tokens": tokens, "labels": labels, "masked": masked.astype(jnp.float32)}
