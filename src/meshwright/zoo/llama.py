"""Llama 2, 3 and 3.1: RMS norm, rotary positions, grouped-query attention, SwiGLU, untied head.

Qwen 2 and Mistral are Llamas, too: one has biases for queries, keys and values, the other sees a window. `loss`,
`logits` and `sample` are those of all decoders whose configurations are a `Decoder`; each has an `init` of its own.

Shapes in comments: B batch, S sequence, D hidden, N heads, K key-value heads, H head dim, F feed-forward, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.zoo.attention import Mix, attend
from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import Array, PyTree, capped, init_stack, project, rms_norm, run_stack, sample_tokens
from meshwright.zoo.losses import mean_token_loss
from meshwright.zoo.moe import mixture
from meshwright.zoo.rotary import Scaling, make_rotation, rotate

#: The projections of a layer, in the order of `Config.biases`.
BIASES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The fields that Llama and the decoders after it share.

    Attributes:
        rope_theta: The base of the rotary wavelengths.
        rope_scaling: What makes them longer, for sequences longer than the model was first trained on.
        epsilon: What norms add to the mean square.

    Where a model has experts, `experts` of them, it also has the options of `moe.mixture`, and `aux_weight`.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    rope_theta: float
    rope_scaling: Scaling | None = None
    epsilon: float = 1e-5
    dtype: str = "bfloat16"
    scan: bool = False
    checkpoint: str = "none"
    attention: str | None = None
    loss_chunks: int | None = None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How many positions, its own included, each one looks at, in the kinds of layers that take turns."""
        return (None,)

    @property
    def logit_cap(self) -> float | None:
        """What logits are bent to stay below; None for no cap."""
        return None

    def decode(
        self: Any, params: PyTree, tokens: Array, positions: Array | None, mix: Mix
    ) -> tuple[Array, Array | None]:
        """The activations after the last norm, B S to B S D, and the auxiliary losses of all routers, if there are any.

        Args:
            params: The parameters.
            tokens: The tokens.
            positions: The position of each token, (S,); None for 0, 1, 2 and so on.
            mix: What mixes queries, keys and values.
        """
        x = params["embed"][tokens].astype(self.dtype)  # B S D
        places = x.shape[1] if positions is None else positions
        rotation = make_rotation(places, self.head_dim, self.rope_theta, self.rope_scaling)
        layers = tuple(partial(_layer, self, rotation, mix, window) for window in self.windows)
        start = jnp.float32(0) if getattr(self, "experts", 0) else None
        x, aux = run_stack(layers, params["layers"], (x, start), checkpoint=self.checkpoint)
        return rms_norm(x, params["norm"], self.epsilon), aux

    def run_experts(self, weights: PyTree, x: Array) -> Array:
        """Each expert on its buffer, E G C D to E G C D."""
        return swiglu(weights, x, "egcd,edf->egcf", "egcf,efd->egcd")


@dataclass(frozen=True, kw_only=True)
class Config(Decoder):
    """The shape of one Llama.

    Attributes:
        head_size: Width of a head; hidden / heads if None.
        window: How many positions, its own included, each one looks at; None for all.
        biases: The projections that have biases, of `BIASES`.
        tied: Whether the embedding is used again as the head.
    """

    rope_theta: float = 10_000.0
    head_size: int | None = None
    window: int | None = None
    biases: tuple[str, ...] = ()
    tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (self.window,)


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters."""
    return init_model(config, key, partial(_init_layer, config))


def init_model(config: Any, key: Array, init_layer: Callable[[Array], PyTree]) -> PyTree:
    """Returns the parameters of any model with Llama's embedding, norm and head around its layers.

    A model whose embedding is used again as its head, which `config.tied` says, has none.
    """
    embed_key, head_key, layers_key = split(key, 3)
    params = {
        "embed": normal(embed_key, config.vocab, config.hidden),
        "layers": init_stack(init_layer, layers_key, config.layers, scan=config.scan),
        "norm": jnp.ones(config.hidden),
    }
    return params if config.tied else params | {"head": normal(head_key, config.vocab, config.hidden)}


def _init_layer(config: Config, key: Array) -> PyTree:
    d, f = config.hidden, config.ffn
    keys = split(key, 4)
    return {
        "attn_norm": jnp.ones(d),
        **init_attention(keys[0], d, config.heads, config.kv_heads, config.head_dim),
        "mlp_norm": jnp.ones(d),
        **init_swiglu(keys[1:], d=d, ffn=f),
        **init_biases(config),
    }


def init_biases(config: Config) -> PyTree:
    """Returns the biases of the projections of one layer that have some, all zero."""
    heads, own = (config.heads, config.head_dim), (config.kv_heads, config.head_dim)
    d, f = (config.hidden,), (config.ffn,)
    shapes = dict(zip(BIASES, (heads, own, own, d, f, f, d), strict=True))
    return {f"{name}_bias": jnp.zeros(shapes[name]) for name in config.biases}


def init_attention(key: Array, d: int, heads: int, kv_heads: int, head_dim: int) -> PyTree:
    """Returns the four projections of grouped-query attention, with heads as a dim of their own."""
    keys = split(key, 4)
    return {
        "q": normal(keys[0], d, heads, head_dim),
        "k": normal(keys[1], d, kv_heads, head_dim),
        "v": normal(keys[2], d, kv_heads, head_dim),
        "o": normal(keys[3], heads, head_dim, d),
    }


def init_swiglu(keys: Array, *experts: int, d: int, ffn: int) -> PyTree:
    """Returns the three projections of a gated feed-forward, with a leading dim where there are several of them."""
    return {
        "gate": normal(keys[0], *experts, d, ffn),
        "up": normal(keys[1], *experts, d, ffn),
        "down": normal(keys[2], *experts, ffn, d),
    }


def loss(config: Any, params: PyTree, batch: PyTree) -> Array:
    """Mean cross entropy of the next token, plus the mean auxiliary loss of the routers where there are experts."""
    x, aux = config.decode(params, batch["tokens"], None, attend)
    mean = next_token_loss(params, x, batch["labels"], config.loss_chunks, config.logit_cap)
    return mean if aux is None else mean + config.aux_weight * aux / config.layers


def logits(
    config: Any,
    params: PyTree,
    tokens: Array,
    positions: Array | None = None,
    mix: Mix = attend,
    rows: Array | None = None,
) -> Array:
    """The scores of each position's next token, B S to B S V.

    Args:
        config: The model.
        params: Its parameters.
        tokens: The tokens.
        positions: The position of each token, (S,); None for 0, 1, 2 and so on.
        mix: What mixes queries, keys and values; for serving, what keeps them in a cache.
        rows: Of which tokens logits are made, as indices of S; None for all.
    """
    scores = head(params, config.decode(params, tokens, positions, mix)[0], rows)
    return scores if config.logit_cap is None else capped(scores, config.logit_cap)


def next_token_loss(params: PyTree, x: Array, labels: Array, chunks: int | None, cap: float | None = None) -> Array:
    """Mean cross entropy of the next token, after the last norm; a model without a head uses its embedding again."""
    return mean_token_loss(params.get("head", params["embed"]), x, labels, chunks, cap)


def head(params: PyTree, x: Array, rows: Array | None = None) -> Array:
    """The logits of all positions or of some `rows` of them, B S D to B S V, after the last norm."""
    x = x if rows is None else x[:, rows]
    return project("bsd,vd->bsv", x, params.get("head", params["embed"]))


def _layer(config: Any, rotation: PyTree, mix: Mix, window: int | None, weights: PyTree, carry: PyTree) -> PyTree:
    """A layer, whose feed-forward is one or a mixture of experts; it adds its auxiliary loss to that of others."""
    x, aux = carry
    normed = rms_norm(x, weights["attn_norm"], config.epsilon)
    x = x + attention(config, weights, normed, rotation, mix, window=window, sinks=weights.get("sinks"))
    normed = rms_norm(x, weights["mlp_norm"], config.epsilon)
    if "router" not in weights:
        return x + mlp(weights, normed), aux
    y, layer_aux = mix_experts(config, weights, normed, config.run_experts)
    return x + y, aux + layer_aux


def mix_experts(
    config: Any, weights: PyTree, x: Array, experts: Callable[[PyTree, Array], Array], **options: Any
) -> tuple[Array, Array]:
    """`moe.mixture` of a layer's experts, which are gated feed-forwards, by the numbers of a configuration."""
    names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
    return mixture(
        x,
        weights["router"],
        experts,
        {name: weights[name] for name in names if name in weights},
        bias=weights.get("router_bias"),
        active=config.active,
        group_size=config.group_size,
        capacity_factor=config.capacity_factor,
        **options,
    )


@jax.named_scope("attention")
def attention(config: Any, weights: PyTree, x: Array, rotation: PyTree, mix: Mix = attend, **options: Any) -> Array:
    """Causal grouped-query attention with rotary positions, and norms of queries and keys where there are any.

    Args:
        config: A `Decoder`, which names the kind of attention and the norms' epsilon.
        weights: The projections; `"q_norm"` and `"k_norm"`, and biases such as `"q_bias"`, where the model has them.
        x: Activations, B S D, after the norm.
        rotation: What `make_rotation` returns.
        mix: What mixes them.
        **options: Its other options.
    """
    q, k, v = (project("bsd,dnh->bsnh", x, weights[name], weights.get(f"{name}_bias")) for name in "qkv")
    if "q_norm" in weights:
        q, k = (rms_norm(y, weights[name], config.epsilon) for y, name in ((q, "q_norm"), (k, "k_norm")))
    mixed = mix(rotate(q, rotation), rotate(k, rotation), v, causal=True, kind=config.attention, **options)
    return project("bsnh,nhd->bsd", mixed, weights["o"], weights.get("o_bias"))


@jax.named_scope("mlp")
def mlp(weights: PyTree, x: Array) -> Array:
    """The feed-forward half, B S D to B S D; the caller applies the norm."""
    return swiglu(weights, x, "bsd,df->bsf", "bsf,fd->bsd")


def swiglu(weights: PyTree, x: Array, into: str, out: str) -> Array:
    """The gated feed-forward (https://arxiv.org/abs/2002.05202); the einsums say which dims it has."""
    gate = project(into, x, weights["gate"], weights.get("gate_bias"))
    up = project(into, x, weights["up"], weights.get("up_bias"))
    return project(out, jax.nn.silu(gate) * up, weights["down"], weights.get("down_bias"))


def sample(config: Any, key: Array, batch: int, seq: int) -> PyTree:
    """Returns a batch of random tokens."""
    return sample_tokens(key, batch, seq, config.vocab)
