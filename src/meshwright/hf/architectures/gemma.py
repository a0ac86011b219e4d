"""Gemma 1 and 2, and the text model of Gemma 3."""

from typing import Any

from meshwright.hf.architectures import rope
from meshwright.hf.architectures.base import Json, Key, Unsupported
from meshwright.hf.architectures.llama import DECODER, SIZES, SWIGLU, decoder, kv_heads, written
from meshwright.hf.layout import Weight

_SLIDING, _FULL = "sliding_attention", "full_attention"
_WEIGHTS = (
    *(weight for weight in DECODER if weight.path != "layers/{i}/mlp_norm"),
    Weight("layers/{i}/q_norm", "layers.{i}.self_attn.q_norm.weight", "h -> h"),
    Weight("layers/{i}/k_norm", "layers.{i}.self_attn.k_norm.weight", "h -> h"),
    Weight("layers/{i}/attn_out_norm", "layers.{i}.post_attention_layernorm.weight", "d -> d"),
    Weight("layers/{i}/mlp_norm", "layers.{i}.pre_feedforward_layernorm.weight", "d -> d"),
    Weight("layers/{i}/mlp_out_norm", "layers.{i}.post_feedforward_layernorm.weight", "d -> d"),
    *SWIGLU,
)
_KEYS = (*SIZES, Key("head_dim", "head_dim", 256), Key("query_pre_attn_scalar", "query_width", 256))
_ONLY = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "tie_word_embeddings": (True,),
    "attention_bias": (False,),
    "use_bidirectional_attention": (None, False),
}
_DERIVED = ("num_key_value_heads", "layer_types", "hidden_act", *rope.KEYS)


def _gemma_derived(keys: Json) -> Json:
    none = {"window": None, "period": 1, "norms_queries": False, "norms_outputs": False}
    return {**kv_heads(keys), **rope.read(keys, 10_000.0), **none, "query_width": keys.get("head_dim", 256)}


def kinds(layers: int, period: int) -> list[str]:
    """The kinds of layers of which one in `period`, the last of them, looks at the whole sequence."""
    return [_SLIDING if (layer + 1) % period else _FULL for layer in range(layers)]


def alternating(keys: Json, period: int) -> None:
    """Refuses layers that take turns in another order."""
    given = keys.get("layer_types")
    if given is not None and list(given) != kinds(len(given), period):
        raise Unsupported(f"layer_types is {', '.join(given)}, and in the zoo one layer in {period} has no window")


def _gemma2_derived(keys: Json) -> Json:
    alternating(keys, 2)
    fields = rope.read(keys, 10_000.0)
    if fields["rope_scaling"] is not None:
        raise Unsupported("rope_scaling is given, and the zoo's Gemma 2 has none")
    return {**kv_heads(keys), **fields, "local_rope_theta": fields["rope_theta"], "period": 2, "norms_queries": False}


def _gemma2_written(config: Any) -> Json:
    layers = {"num_key_value_heads": config.kv_heads, "layer_types": kinds(config.layers, 2)}
    return {**layers, "rope_theta": config.rope_theta}


def _gemma3_derived(keys: Json) -> Json:
    period = _period(keys)
    alternating(keys, period)
    given = keys.get("rope_parameters") or {}
    near = {"rope_parameters": given.get(_SLIDING) or {"rope_theta": keys.get("rope_local_base_freq", 10_000.0)}}
    far = {"rope_parameters": given[_FULL]} if _FULL in given else keys
    local = rope.read(near, 10_000.0)
    if local["rope_scaling"] is not None:
        raise Unsupported(f"the rotary positions of {_SLIDING} are scaled, and the zoo's are not")
    own = {"local_rope_theta": local["rope_theta"], "period": period, "norms_queries": True}
    return {**kv_heads(keys), **rope.read(far, 1_000_000.0), **own}


def _period(keys: Json) -> int:
    """Every how many layers one has no window."""
    given = keys.get("layer_types")
    if given and _FULL in given:
        return list(given).index(_FULL) + 1
    return keys.get("sliding_window_pattern") or keys.get("_sliding_window_pattern") or 6


def _gemma3_written(config: Any) -> Json:
    far = {"rope_theta": config.rope_theta, **(rope.written_scaling(config.rope_scaling) or {"rope_type": "default"})}
    near = {"rope_theta": config.local_rope_theta, "rope_type": "default"}
    return {
        "num_key_value_heads": config.kv_heads,
        "layer_types": kinds(config.layers, config.period),
        "sliding_window_pattern": config.period,
        "rope_theta": config.rope_theta,
        "rope_local_base_freq": config.local_rope_theta,
        "rope_scaling": rope.written_scaling(config.rope_scaling),
        "rope_parameters": {_SLIDING: near, _FULL: far},
    }


GEMMA = decoder(
    "gemma",
    "GemmaForCausalLM",
    "gemma",
    keys=(*SIZES, Key("head_dim", "head_dim", 256)),
    weights=(*DECODER, *SWIGLU),
    # The released files say "gelu", which transformers takes for the approximation with tanh.
    only={**_ONLY, "hidden_activation": ("gelu_pytorch_tanh", None), "hidden_act": ("gelu_pytorch_tanh", "gelu")},
    derived=_gemma_derived,
    derived_keys=("num_key_value_heads", *rope.KEYS),
    written=written,
)
GEMMA2 = decoder(
    "gemma2",
    "Gemma2ForCausalLM",
    "gemma",
    keys=(
        *_KEYS,
        Key("sliding_window", "window", 4096),
        Key("attn_logit_softcapping", "score_cap", 50.0),
        Key("final_logit_softcapping", "logit_cap", 30.0),
    ),
    weights=_WEIGHTS,
    only=_ONLY,
    derived=_gemma2_derived,
    derived_keys=_DERIVED,
    written=_gemma2_written,
)
GEMMA3 = decoder(
    "gemma3_text",
    "Gemma3ForCausalLM",
    "gemma",
    keys=(
        *_KEYS,
        Key("sliding_window", "window", 4096),
        Key("final_logit_softcapping", "logit_cap", None),
    ),
    weights=_WEIGHTS,
    only={**_ONLY, "attn_logit_softcapping": (None,)},  # transformers reads such a cap and does not apply it
    derived=_gemma3_derived,
    derived_keys=(*_DERIVED, "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"),
    written=_gemma3_written,
)
