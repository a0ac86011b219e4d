"""Llama 1 to 3, and the models that are Llamas with other details: Mistral with a window, Qwen 2 with biases."""

from typing import Any

from meshwright.hf.architectures import rope
from meshwright.hf.architectures.base import Architecture, Json, Key, linear
from meshwright.hf.layout import Weight
from meshwright.zoo.llama import BIASES

#: What all decoders of this kind have around their layers and in their attention.
DECODER = (
    Weight("embed", "embed_tokens.weight", "v d -> v d"),
    Weight("norm", "norm.weight", "d -> d"),
    Weight("layers/{i}/attn_norm", "layers.{i}.input_layernorm.weight", "d -> d"),
    *linear("layers/{i}/q", "layers.{i}.self_attn.q_proj", "(n h) d -> d n h", "(n h) -> n h"),
    *linear("layers/{i}/k", "layers.{i}.self_attn.k_proj", "(n h) d -> d n h", "(n h) -> n h"),
    *linear("layers/{i}/v", "layers.{i}.self_attn.v_proj", "(n h) d -> d n h", "(n h) -> n h"),
    *linear("layers/{i}/o", "layers.{i}.self_attn.o_proj", "d (n h) -> n h d", "d -> d"),
    Weight("layers/{i}/mlp_norm", "layers.{i}.post_attention_layernorm.weight", "d -> d"),
    Weight("head", "/lm_head.weight", "v d -> v d"),
)
SWIGLU = (
    *linear("layers/{i}/gate", "layers.{i}.mlp.gate_proj", "f d -> d f", "f -> f"),
    *linear("layers/{i}/up", "layers.{i}.mlp.up_proj", "f d -> d f", "f -> f"),
    *linear("layers/{i}/down", "layers.{i}.mlp.down_proj", "d f -> f d", "d -> d"),
)
_SIZES = (
    Key("vocab_size", "vocab"),
    Key("hidden_size", "hidden"),
    Key("num_hidden_layers", "layers"),
    Key("num_attention_heads", "heads"),
    Key("intermediate_size", "ffn"),
)
SIZES = (*_SIZES, Key("rms_norm_eps", "epsilon", 1e-6))
SIZES_LATER = (*_SIZES, Key("rms_norm_eps", "epsilon", 1e-5))  # of those that transformers has with this default
TIED = Key("tie_word_embeddings", "tied", False)
UNUSED = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"/lm_head\.weight")  # the head, where it is tied


def decoder(model_type: str, class_name: str, family: str, **parts: Any) -> Architecture:
    """An architecture whose tensors are named as a Llama's; `parts` are its other attributes."""
    return Architecture(model_type, class_name, family, prefixes=("model.",), unused=UNUSED, **parts)


def kv_heads(keys: Json) -> Json:
    """The number of heads of keys and values, by default that of queries."""
    return {"kv_heads": keys.get("num_key_value_heads") or keys.get("num_attention_heads")}


def _derived(keys: Json) -> Json:
    biases = BIASES[:4] * bool(keys.get("attention_bias")) + BIASES[4:] * bool(keys.get("mlp_bias"))
    return {"biases": biases, **kv_heads(keys), **head_size(keys), **rope.read(keys, 10_000.0)}


def head_size(keys: Json) -> Json:
    """The width of a head, if it does not follow from the others."""
    given = keys.get("head_dim")
    follows = bool(given) and given * keys.get("num_attention_heads", 0) == keys.get("hidden_size")
    return {"head_size": None if follows else given}


def written(config: Any) -> Json:
    """The keys of the heads of keys and values, and of rotary positions."""
    return {"num_key_value_heads": config.kv_heads, **rope.written(config)}


def written_head(config: Any) -> Json:
    """The same with the width of a head."""
    return written(config) | {"head_dim": config.head_dim}


def _written_llama(config: Any) -> Json:
    biases = {"attention_bias": "o" in config.biases, "mlp_bias": "gate" in config.biases}
    return written_head(config) | biases


def _windowed(keys: Json) -> Json:
    return {**_derived(keys), "window": keys.get("sliding_window", 4096)}


def _written_windowed(config: Any) -> Json:
    return written_head(config) | {"sliding_window": config.window}


_ROPE = ("num_key_value_heads", "head_dim", *rope.KEYS)
LLAMA = decoder(
    "llama",
    "LlamaForCausalLM",
    "llama",
    keys=(*SIZES, TIED),
    weights=(*DECODER, *SWIGLU),
    only={"hidden_act": ("silu",), "pretraining_tp": (1, 0, None)},
    derived=_derived,
    derived_keys=("attention_bias", "mlp_bias", *_ROPE),
    written=_written_llama,
)
MISTRAL = decoder(
    "mistral",
    "MistralForCausalLM",
    "llama",
    keys=(*SIZES, TIED),
    weights=(*DECODER, *SWIGLU),
    only={"hidden_act": ("silu",)},
    derived=_windowed,
    derived_keys=("sliding_window", *_ROPE),
    written=_written_windowed,
)
