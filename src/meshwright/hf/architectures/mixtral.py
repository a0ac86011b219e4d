"""Mixtral: a Llama with experts, each of whose matrices is a tensor of its own."""

from typing import Any

from meshwright.hf.architectures import rope
from meshwright.hf.architectures.base import Architecture, Json, Key
from meshwright.hf.architectures.llama import DECODER, SIZES, TIED, UNUSED, head_size, kv_heads
from meshwright.hf.layout import Weight

_EXPERTS = (
    Weight("layers/{i}/router", "layers.{i}.block_sparse_moe.gate.weight", "e d -> d e"),
    Weight("layers/{i}/gate", "layers.{i}.block_sparse_moe.experts.{e}.w1.weight", "f d -> e d f"),
    Weight("layers/{i}/up", "layers.{i}.block_sparse_moe.experts.{e}.w3.weight", "f d -> e d f"),
    Weight("layers/{i}/down", "layers.{i}.block_sparse_moe.experts.{e}.w2.weight", "d f -> e f d"),
)


def _derived(keys: Json) -> Json:
    no_drops = {"group_size": 1}  # tokens of one group compete for buffers
    return {**no_drops, **kv_heads(keys), **head_size(keys), **rope.read(keys, 1_000_000.0)}


def _written(config: Any) -> Json:
    return {"num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, **rope.written(config)}


MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    "mixtral",
    keys=(
        *(key if key.field != "epsilon" else Key("rms_norm_eps", "epsilon", 1e-5) for key in SIZES),
        TIED,
        Key("num_local_experts", "experts", 8),
        Key("num_experts_per_tok", "active", 2),
        Key("sliding_window", "window", None),
    ),
    weights=(*DECODER, *_EXPERTS),
    only={"hidden_act": ("silu",)},
    prefixes=("model.",),
    derived=_derived,
    derived_keys=("num_key_value_heads", "head_dim", *rope.KEYS),
    written=_written,
    unused=UNUSED,
)
