"""GPT-2 and GPT-3: learned positions, pre-norm layers with biases, GELU, and the embedding used again as the head."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from meshwright.zoo import transformer
from meshwright.zoo.draw import integers, normal, split
from meshwright.zoo.layers import Array, PyTree, init_layer_norm, init_stack, layer_norm, run_stack, sample_tokens


@dataclass(frozen=True)
class Config:
    """The shape of one GPT; `positions` is the longest sequence it can read, None if it learns no positions."""

    vocab: int
    positions: int | None
    hidden: int
    layers: int
    heads: int
    dropout: float = 0.0
    dtype: str = "bfloat16"
    scan: bool = False
    checkpoint: str = "none"
    attention: str | None = None
    loss_chunks: int | None = None


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters."""
    embed_key, positions_key, layers_key = split(key, 3)
    init_layer = partial(transformer.init_layer, d=config.hidden, heads=config.heads, ffn=4 * config.hidden)
    learned = {"positions": normal(positions_key, config.positions, config.hidden)} if config.positions else {}
    return {
        "embed": normal(embed_key, config.vocab, config.hidden),
        **learned,
        "layers": init_stack(init_layer, layers_key, config.layers, scan=config.scan),
        "norm": init_layer_norm(config.hidden),
    }


def loss(config: Config, params: PyTree, batch: PyTree) -> Array:
    """Mean cross entropy of the next token."""
    x = transformer.embed(params, batch["tokens"]).astype(config.dtype)  # B S D
    x = run_stack(partial(_layer, config), _with_keys(config, params["layers"], batch), x, checkpoint=config.checkpoint)
    return transformer.next_token_loss(params, x, batch["labels"], config.loss_chunks)


def _with_keys(config: Config, layers: PyTree, batch: PyTree) -> PyTree:
    """Pairs each layer's weights with the random key of its dropout; an empty tuple when there is none."""
    if not config.dropout:
        return [(weights, ()) for weights in layers] if isinstance(layers, list) else (layers, ())
    keys = jax.random.split(jax.random.wrap_key_data(batch["key"]), (config.layers, 2))
    return list(zip(layers, keys, strict=True)) if isinstance(layers, list) else (layers, keys)


def _layer(config: Config, weights_and_keys: PyTree, x: Array) -> Array:
    weights, keys = weights_and_keys
    attn_key, mlp_key = keys if config.dropout else (None, None)
    y = transformer.attention(weights, layer_norm(x, weights["attn_norm"]), causal=True, kind=config.attention)
    x = x + _dropout(config, attn_key, y)
    y = transformer.mlp(weights, layer_norm(x, weights["mlp_norm"]))
    return x + _dropout(config, mlp_key, y)


def _dropout(config: Config, key: Array | None, x: Array) -> Array:
    if key is None:
        return x
    kept = jax.random.bernoulli(key, 1 - config.dropout, x.shape)
    return jnp.where(kept, x / (1 - config.dropout), 0)


def sample(config: Config, key: Array, batch: int, seq: int) -> PyTree:
    """Returns a batch of random tokens and, where there is dropout, the data of the key that draws it."""
    tokens_key, dropout_key = split(key, 2)
    tokens = sample_tokens(tokens_key, batch, seq, config.vocab)
    if not config.dropout:
        return tokens
    return tokens | {"key": integers(dropout_key, 2, below=2**31 - 1).astype(jnp.uint32)}
