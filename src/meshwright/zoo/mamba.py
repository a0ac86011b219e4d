"""Mamba-2: no attention; each layer is a state-space model in its dual form, products within chunks of the sequence.

Shapes in comments: B batch, C chunks, L positions of a chunk, N heads, P head dim, K state.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from meshwright.zoo import llama
from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import Array, PyTree, init_stack, project, rms_norm, run_stack
from meshwright.zoo.llama import sample

__all__ = ["Config", "init", "loss", "sample"]


@dataclass(frozen=True)
class Config:
    """The shape of one Mamba-2; all heads share one group of input and output projections of the state."""

    vocab: int
    hidden: int
    layers: int
    head_dim: int = 64
    state: int = 128
    expand: int = 2
    conv: int = 4
    chunk: int = 256
    dtype: str = "bfloat16"
    scan: bool = False
    checkpoint: str = "none"
    loss_chunks: int | None = None

    @property
    def heads(self) -> int:
        return self.expand * self.hidden // self.head_dim


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters."""
    embed_key, layers_key = split(key)
    return {
        "embed": normal(embed_key, config.vocab, config.hidden),
        "layers": init_stack(partial(_init_layer, config), layers_key, config.layers, scan=config.scan),
        "norm": jnp.ones(config.hidden),
    }


def _init_layer(config: Config, key: Array) -> PyTree:
    d, n, p, k, width = config.hidden, config.heads, config.head_dim, config.state, config.conv
    keys = split(key, 9)
    return {
        "norm": jnp.ones(d),
        "gate": normal(keys[0], d, n, p),
        "values": normal(keys[1], d, n, p),
        "into": normal(keys[2], d, k),
        "out_of": normal(keys[3], d, k),
        "step": normal(keys[4], d, n),
        "values_conv": normal(keys[5], width, n, p, scale=width**-0.5),
        "into_conv": normal(keys[6], width, k, scale=width**-0.5),
        "out_of_conv": normal(keys[7], width, k, scale=width**-0.5),
        "values_bias": jnp.zeros((n, p)),
        "into_bias": jnp.zeros(k),
        "out_of_bias": jnp.zeros(k),
        "step_bias": jnp.zeros(n),
        "log_decay": jnp.log(jnp.linspace(1.0, 16.0, n)),
        "skip": jnp.ones(n),
        "out_norm": jnp.ones((n, p)),
        "o": normal(keys[8], n, p, d),
    }


def loss(config: Config, params: PyTree, batch: PyTree) -> Array:
    """Mean cross entropy of the next token."""
    x = params["embed"][batch["tokens"]].astype(config.dtype)  # B S D
    x = run_stack(partial(_layer, config), params["layers"], x, checkpoint=config.checkpoint)
    return llama.next_token_loss(params, rms_norm(x, params["norm"]), batch["labels"], config.loss_chunks)


def _layer(config: Config, weights: PyTree, x: Array) -> Array:
    normed = rms_norm(x, weights["norm"])
    gate, values = (project("bsd,dnp->bsnp", normed, weights[name]) for name in ("gate", "values"))
    into, out_of = (project("bsd,dk->bsk", normed, weights[name]) for name in ("into", "out_of"))
    step = jax.nn.softplus(project("bsd,dn->bsn", normed, weights["step"]).astype(jnp.float32) + weights["step_bias"])
    convolved = {"values": values, "into": into, "out_of": out_of}
    values, into, out_of = (
        jax.nn.silu(_convolve(y, weights[f"{name}_conv"], weights[f"{name}_bias"])) for name, y in convolved.items()
    )
    decay = -jnp.exp(weights["log_decay"]) * step  # B S N, of the logarithm
    mixed = _state_space(values * step[..., None].astype(values.dtype), decay, into, out_of, config.chunk)
    mixed = (mixed + values * weights["skip"][:, None].astype(values.dtype)) * jax.nn.silu(gate)
    return x + project("bsnp,npd->bsd", _gated_norm(mixed, weights["out_norm"]), weights["o"])


@jax.named_scope("conv")
def _convolve(x: Array, kernel: Array, bias: Array) -> Array:
    """A causal convolution over positions, each channel by itself."""
    width, seq = len(kernel), x.shape[1]
    padded = jnp.pad(x, ((0, 0), (width - 1, 0), *((0, 0),) * (x.ndim - 2)))
    taps = (padded[:, i : i + seq] * kernel[i].astype(x.dtype) for i in range(width))
    return sum(taps, start=bias.astype(x.dtype))


def _gated_norm(x: Array, scale: Array) -> Array:
    """Root-mean-square norm over heads and their dims together, B S N P."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=(-2, -1), keepdims=True) + 1e-5)
    return (y * scale).astype(x.dtype)


@jax.named_scope("state_space")
def _state_space(values: Array, decay: Array, into: Array, out_of: Array, chunk: int) -> Array:
    """Structured state-space duality (https://arxiv.org/abs/2405.21060, listing 1).

    Args:
        values: Inputs, B S N P, times their steps.
        decay: Logarithm of what a step leaves of the state, B S N, float32.
        into: How inputs enter the state, B S K.
        out_of: How outputs are read from it, B S K.
        chunk: Positions that are mixed by a matrix; from chunk to chunk there is only the state.

    Returns:
        The outputs, B S N P.
    """
    batch, seq, heads, head_dim = values.shape
    chunk = min(chunk, seq)
    values, decay, into, out_of = (
        y.reshape(batch, seq // chunk, chunk, *y.shape[2:]) for y in (values, decay, into, out_of)
    )
    summed = jnp.cumsum(decay, axis=2)  # B C L N
    dtype = values.dtype
    near = _between(summed, axis=2).astype(dtype)  # B C L M N: what is left at l of an input at m
    scores = jnp.einsum("bclk,bcmk->bclm", out_of, into)
    inside = jnp.einsum("bclmn,bcmnp->bclnp", scores[..., None] * near, values)
    to_end = jnp.exp(summed[:, :, -1:] - summed).astype(dtype)
    states = jnp.einsum("bclk,bclnp->bcnpk", into, values * to_end[..., None])
    # The state before each chunk: all earlier chunks' states, decayed by the chunks in between.
    ends = jnp.pad(jnp.cumsum(summed[:, :, -1], axis=1), ((0, 0), (1, 0), (0, 0)))  # B C+1 N
    far = _between(ends, axis=1)[:, :-1, 1:].astype(dtype)  # B C C N
    before = jnp.einsum("bzcn,bcnpk->bznpk", far, states)
    outside = jnp.einsum("bclk,bcnpk->bclnp", out_of, before) * jnp.exp(summed).astype(dtype)[..., None]
    return (inside + outside).reshape(batch, seq, heads, head_dim)


def _between(summed: Array, axis: int) -> Array:
    """exp(sum of the decays after m up to l) for m ≤ l, else 0; l and m are dims `axis` and `axis + 1`."""
    difference = jnp.expand_dims(summed, axis + 1) - jnp.expand_dims(summed, axis)
    positions = jnp.arange(summed.shape[axis])
    seen = (positions[:, None] >= positions)[..., None]  # L M N
    return jnp.exp(jnp.where(seen, difference, -jnp.inf))
