"""Gemma 3: norms before and after each half, sliding windows on all but every sixth layer, GeGLU, tied embeddings.

Gemma 2 has windows on every second layer and, instead of norms of queries and keys, caps on scores and logits. Gemma 1
has neither, no windows, and norms before each half alone.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from meshwright.zoo import llama
from meshwright.zoo.attention import Mix
from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import Array, PyTree, init_stack, project, rms_norm, run_stack
from meshwright.zoo.llama import logits, loss, sample
from meshwright.zoo.rotary import make_rotation

__all__ = ["Config", "init", "logits", "loss", "sample"]
_QUERY_NORMS = ("q_norm", "k_norm")
_OUTPUT_NORMS = ("attn_out_norm", "mlp_out_norm")


@dataclass(frozen=True, kw_only=True)
class Config(llama.Decoder):
    """The shape of one Gemma; one layer in `period`, the last of them, looks at the whole sequence.

    Attributes:
        window: Positions that the other layers look at; None where there are none, and `period` is 1.
        query_width: Scores are divided by the root of it.
        local_rope_theta: The base of the wavelengths of the layers with windows, whose `rope_scaling` is none.
        norms_queries: Whether queries and keys have norms.
        norms_outputs: Whether there are norms after each half of a layer, too.
        score_cap: What scores of attention stay below; None for no cap.
        logit_cap: The same of logits.
    """

    head_dim: int
    window: int | None
    query_width: int
    period: int = 6
    rope_theta: float = 1_000_000.0
    local_rope_theta: float = 10_000.0
    epsilon: float = 1e-6
    norms_queries: bool = True
    norms_outputs: bool = True
    score_cap: float | None = None
    logit_cap: float | None = None

    def decode(self, params: PyTree, tokens: Array, positions: Array | None, mix: Mix) -> tuple[Array, None]:
        """As in `llama.Decoder`; what is embedded is scaled, and layers with windows have a rotation of their own."""
        x = params["embed"][tokens].astype(self.dtype) * self.hidden**0.5  # B S D
        places = x.shape[1] if positions is None else positions
        near = make_rotation(places, self.head_dim, self.local_rope_theta)
        far = make_rotation(places, self.head_dim, self.rope_theta, self.rope_scaling)
        local = partial(_layer, self, near, mix, self.window)
        layers = (*(local,) * (self.period - 1), partial(_layer, self, far, mix, None))
        x = run_stack(layers, params["layers"], x, checkpoint=self.checkpoint)
        return _norm(self, x, params["norm"]), None


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
    norms = ("attn_norm", "mlp_norm", *_OUTPUT_NORMS * config.norms_outputs)
    return {
        **{name: jnp.zeros(d) for name in norms},
        **{name: jnp.zeros(config.head_dim) for name in _QUERY_NORMS if config.norms_queries},
        **llama.init_attention(attention_key, d, config.heads, config.kv_heads, config.head_dim),
        **llama.init_swiglu(split(mlp_key, 3), d=d, ffn=config.ffn),
    }


def _layer(config: Config, rotation: PyTree, mix: Mix, window: int | None, weights: PyTree, x: Array) -> Array:
    options = {"window": window, "scale": config.query_width**-0.5, "cap": config.score_cap}
    scaled = weights | {name: 1 + weights[name] for name in _QUERY_NORMS if name in weights}
    mixed = llama.attention(config, scaled, _norm(config, x, weights["attn_norm"]), rotation, mix, **options)
    x = x + _output(config, mixed, weights, "attn_out_norm")
    y = _mlp(weights, _norm(config, x, weights["mlp_norm"]))
    return x + _output(config, y, weights, "mlp_out_norm")


def _output(config: Config, x: Array, weights: PyTree, name: str) -> Array:
    """What half of a layer adds, with its norm if there is one."""
    return _norm(config, x, weights[name]) if config.norms_outputs else x


@jax.named_scope("mlp")
def _mlp(weights: PyTree, x: Array) -> Array:
    gate, up = (project("bsd,df->bsf", x, weights[name]) for name in ("gate", "up"))
    return project("bsf,fd->bsd", jax.nn.gelu(gate) * up, weights["down"])


def _norm(config: Config, x: Array, scale: Array) -> Array:
    return rms_norm(x, 1 + scale, config.epsilon)
