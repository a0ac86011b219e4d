"""Qwen 2, a Llama whose queries, keys and values have biases, and Qwen 3, which norms queries and keys."""

from typing import Any

from meshwright.hf.architectures import rope
from meshwright.hf.architectures.base import Json, Key, Unsupported
from meshwright.hf.architectures.llama import DECODER, SIZES, SWIGLU, TIED, decoder, kv_heads, written
from meshwright.hf.layout import Weight

_ONLY = {"hidden_act": ("silu",), "use_sliding_window": (False,)}
_DERIVED = ("num_key_value_heads", "sliding_window", "max_window_layers", "layer_types", *rope.KEYS)
_QUERY_NORMS = (
    Weight("layers/{i}/q_norm", "layers.{i}.self_attn.q_norm.weight", "h -> h"),
    Weight("layers/{i}/k_norm", "layers.{i}.self_attn.k_norm.weight", "h -> h"),
)
_EXPERTS = (
    Weight("layers/{i}/router", "layers.{i}.mlp.gate.weight", "e d -> d e"),
    Weight("layers/{i}/gate", "layers.{i}.mlp.experts.{e}.gate_proj.weight", "f d -> e d f"),
    Weight("layers/{i}/up", "layers.{i}.mlp.experts.{e}.up_proj.weight", "f d -> e d f"),
    Weight("layers/{i}/down", "layers.{i}.mlp.experts.{e}.down_proj.weight", "d f -> e f d"),
)


def _derived(keys: Json) -> Json:
    if set(keys.get("layer_types") or ()) - {"full_attention"}:
        raise Unsupported("layer_types has layers with windows, and the zoo's have none")
    return {**kv_heads(keys), **rope.read(keys, 10_000.0)}


def _derived_qwen2(keys: Json) -> Json:
    return _derived(keys) | {"biases": ("q", "k", "v")}


def _written_qwen2(config: Any) -> Json:
    if config.head_size is not None:
        raise Unsupported("Qwen 2 has heads of the width that follows from the others")
    return written(config)


def _derived_experts(keys: Json) -> Json:
    if keys.get("mlp_only_layers"):
        raise Unsupported("mlp_only_layers names layers without experts, and all of the zoo's have some")
    if not keys.get("norm_topk_prob", False):
        raise Unsupported("norm_topk_prob is false, and the zoo's gates of a token's experts add up to 1")
    experts = keys.get("num_local_experts") or keys.get("num_experts") or 128
    return _derived(keys) | {"experts": experts, "group_size": 1}  # groups of one token drop none


def _written_experts(config: Any) -> Json:
    return written(config) | {"num_experts": config.experts, "norm_topk_prob": True}


QWEN2 = decoder(
    "qwen2",
    "Qwen2ForCausalLM",
    "llama",
    keys=(*SIZES, TIED),
    weights=(*DECODER, *SWIGLU),
    only=_ONLY,
    derived=_derived_qwen2,
    derived_keys=_DERIVED,
    written=_written_qwen2,
)
QWEN3 = decoder(
    "qwen3",
    "Qwen3ForCausalLM",
    "qwen",
    keys=(*SIZES, TIED, Key("head_dim", "head_dim", 128)),
    weights=(*DECODER, *_QUERY_NORMS, *SWIGLU),
    only={**_ONLY, "attention_bias": (False,)},
    derived=_derived,
    derived_keys=_DERIVED,
    written=written,
)
QWEN3_MOE = decoder(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "qwen",
    keys=(
        *(key for key in SIZES if key.field != "ffn"),
        TIED,
        Key("head_dim", "head_dim", None),
        Key("moe_intermediate_size", "ffn"),
        Key("num_experts_per_tok", "active"),
    ),
    weights=(*DECODER, *_QUERY_NORMS, *_EXPERTS),
    only={**_ONLY, "attention_bias": (False,), "decoder_sparse_step": (1,)},
    derived=_derived_experts,
    derived_keys=(
        "num_experts",
        "num_local_experts",
        "norm_topk_prob",
        "mlp_only_layers",
        "intermediate_size",
        *_DERIVED,
    ),
    written=_written_experts,
)
