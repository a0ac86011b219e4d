"""GPT-OSS in floating point, or with the experts of the releases, which are in MXFP4."""

from typing import Any

from meshwright.hf.architectures import rope
from meshwright.hf.architectures.base import Json, Key
from meshwright.hf.architectures.gemma import alternating, kinds
from meshwright.hf.architectures.llama import DECODER, SIZES_LATER, TIED, decoder, kv_heads, written
from meshwright.hf.layout import Pick, Weight

_GATE, _UP = (Pick("half", index, 2) for index in range(2))
_EXPERTS = (
    Weight("layers/{i}/sinks", "layers.{i}.self_attn.sinks", "n -> n"),
    Weight("layers/{i}/router", "layers.{i}.mlp.router.weight", "e d -> d e"),
    Weight("layers/{i}/router_bias", "layers.{i}.mlp.router.bias", "e -> e"),
    Weight("layers/{i}/gate", "layers.{i}.mlp.experts.gate_up_proj", "e d (f half) -> e d f", _GATE),
    Weight("layers/{i}/up", "layers.{i}.mlp.experts.gate_up_proj", "e d (f half) -> e d f", _UP),
    Weight("layers/{i}/gate_bias", "layers.{i}.mlp.experts.gate_up_proj_bias", "e (f half) -> e f", _GATE),
    Weight("layers/{i}/up_bias", "layers.{i}.mlp.experts.gate_up_proj_bias", "e (f half) -> e f", _UP),
    Weight("layers/{i}/down", "layers.{i}.mlp.experts.down_proj", "e f d -> e f d"),
    Weight("layers/{i}/down_bias", "layers.{i}.mlp.experts.down_proj_bias", "e d -> e d"),
)
_PACKED = (
    Weight("layers/{i}/gate", "layers.{i}.mlp.experts.gate_up_proj", "e (f half) d -> e d f", _GATE),
    Weight("layers/{i}/up", "layers.{i}.mlp.experts.gate_up_proj", "e (f half) d -> e d f", _UP),
    Weight("layers/{i}/down", "layers.{i}.mlp.experts.down_proj", "e d f -> e f d"),
)
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _derived(keys: Json) -> Json:
    alternating(keys, 2)
    scaled = keys if keys.get("rope_parameters") or "rope_scaling" in keys else {**keys, "rope_scaling": _YARN}
    no_drops = {"group_size": 1}  # tokens of one group compete for buffers
    return {**no_drops, **kv_heads(keys), **rope.read(scaled, 150_000.0)}


def _written(config: Any) -> Json:
    return {"layer_types": kinds(config.layers, 2), **written(config)}


GPT_OSS = decoder(
    "gpt_oss",
    "GptOssForCausalLM",
    "gpt_oss",
    keys=(
        *SIZES_LATER,
        TIED,
        Key("head_dim", "head_dim", 64),
        Key("num_local_experts", "experts", 128),
        Key("num_experts_per_tok", "active", 4),
        Key("sliding_window", "window", 128),
    ),
    weights=(*DECODER, *_EXPERTS),
    packed=_PACKED,
    only={
        "hidden_act": ("silu",),
        "attention_bias": (True,),
        "swiglu_limit": (7.0,),
        "swiglu_alpha": (1.702,),
    },
    derived=_derived,
    # The released files say two things twice.
    derived_keys=("num_key_value_heads", "layer_types", "experts_per_token", "initial_context_length", *rope.KEYS),
    written=_written,
)
