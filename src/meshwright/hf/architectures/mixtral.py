"""Mixtral: a Llama with experts, each of whose matrices is a tensor of its own."""

from meshwright.hf.architectures import rope
from meshwright.hf.architectures.base import Json, Key
from meshwright.hf.architectures.llama import DECODER, SIZES_LATER, TIED, decoder, head_size, kv_heads, written_head
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


MIXTRAL = decoder(
    "mixtral",
    "MixtralForCausalLM",
    "mixtral",
    keys=(
        *SIZES_LATER,
        TIED,
        Key("num_local_experts", "experts", 8),
        Key("num_experts_per_tok", "active", 2),
        Key("sliding_window", "window", None),
    ),
    weights=(*DECODER, *_EXPERTS),
    only={"hidden_act": ("silu",)},
    derived=_derived,
    derived_keys=("num_key_value_heads", "head_dim", *rope.KEYS),
    written=written_head,
)
