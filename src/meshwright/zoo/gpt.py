"""GPT-2, GPT-3 and OPT: learned positions, pre-norm layers with biases, and the embedding used again as the head."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from meshwright.zoo import llama, transformer
from meshwright.zoo.attention import Mix, attend
from meshwright.zoo.draw import integers, normal, split
from meshwright.zoo.layers import (
    Array,
    PyTree,
    init_layer_norm,
    init_stack,
    layer_norm,
    run_stack,
    sample_tokens,
)
from meshwright.zoo.losses import mean_token_loss


@dataclass(frozen=True)
class Config:
    """The shape of one GPT.

    Attributes:
        positions: The longest sequence it can read; None if it learns no positions.
        first_position: How many rows of the table of positions come before that of the first token, as in OPT.
        ffn: The inner width of the feed-forward; four times the hidden one if None.
        kv_heads: Heads of keys and values, each shared by a group of queries' heads; as many as these if None.
        activation: A name of `transformer.ACTIVATIONS`.
    """

    vocab: int
    positions: int | None
    hidden: int
    layers: int
    heads: int
    first_position: int = 0
    ffn: int | None = None
    activation: str = "gelu"
    epsilon: float = 1e-5
    dropout: float = 0.0
    dtype: str = "bfloat16"
    scan: bool = False
    checkpoint: str = "none"
    attention: str | None = None
    loss_chunks: int | None = None
    kv_heads: int | None = None


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters."""
    embed_key, positions_key, layers_key = split(key, 3)
    d, ffn = config.hidden, config.ffn or 4 * config.hidden
    init_layer = partial(transformer.init_layer, d=d, heads=config.heads, ffn=ffn, kv_heads=config.kv_heads)
    rows = config.first_position + (config.positions or 0)
    learned = {"positions": normal(positions_key, rows, config.hidden)} if config.positions else {}
    return {
        "embed": normal(embed_key, config.vocab, config.hidden),
        **learned,
        "layers": init_stack(init_layer, layers_key, config.layers, scan=config.scan),
        "norm": init_layer_norm(config.hidden),
    }


def loss(config: Config, params: PyTree, batch: PyTree) -> Array:
    """Mean cross entropy of the next token."""
    x = _decode(config, params, batch, None, attend)
    return mean_token_loss(params["embed"], x, batch["labels"], config.loss_chunks)


def logits(
    config: Config,
    params: PyTree,
    tokens: Array,
    positions: Array | None = None,
    mix: Mix = attend,
    rows: Array | None = None,
) -> Array:
    """The scores of each position's next token, B S to B S V, without dropout.

    The other arguments are those of `llama.logits`.
    """
    x = _decode(replace(config, dropout=0.0), params, {"tokens": tokens}, positions, mix)
    return llama.head(params, x, rows)


def _decode(config: Config, params: PyTree, batch: PyTree, positions: Array | None, mix: Mix) -> Array:
    """The activations after the last norm, B S to B S D."""
    x = transformer.embed(params, batch["tokens"], config.first_position, positions).astype(config.dtype)  # B S D
    x = run_stack(
        partial(_layer, config, mix), _with_keys(config, params["layers"], batch), x, checkpoint=config.checkpoint
    )
    return layer_norm(x, params["norm"], config.epsilon)


def _with_keys(config: Config, layers: PyTree, batch: PyTree) -> PyTree:
    """Pairs each layer's weights with the random key of its dropout; an empty tuple when there is none."""
    if not config.dropout:
        return [(weights, ()) for weights in layers] if isinstance(layers, list) else (layers, ())
    keys = jax.random.split(jax.random.wrap_key_data(batch["key"]), (config.layers, 2))
    return list(zip(layers, keys, strict=True)) if isinstance(layers, list) else (layers, keys)


def _layer(config: Config, mix: Mix, weights_and_keys: PyTree, x: Array) -> Array:
    weights, keys = weights_and_keys
    attn_key, mlp_key = keys if config.dropout else (None, None)
    normed = layer_norm(x, weights["attn_norm"], config.epsilon)
    y = transformer.attention(weights, normed, causal=True, kind=config.attention, mix=mix)
    x = x + _dropout(config, attn_key, y)
    y = transformer.mlp(weights, layer_norm(x, weights["mlp_norm"], config.epsilon), config.activation)
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
