"""GPT-2 and OPT: learned positions, layer norms, biases everywhere, tied embeddings."""

from typing import Any

from meshwright.hf.architectures.base import Architecture, Json, Key, Unsupported, linear
from meshwright.hf.layout import Pick, Weight

_QUERIES, _KEYS, _VALUES = (Pick("part", index, 3) for index in range(3))


def _layer_norm(path: str, name: str) -> tuple[Weight, Weight]:
    return Weight(f"{path}/scale", f"{name}.weight", "d -> d"), Weight(f"{path}/bias", f"{name}.bias", "d -> d")


_GPT2 = (
    Weight("embed", "wte.weight", "v d -> v d"),
    Weight("positions", "wpe.weight", "p d -> p d"),
    *_layer_norm("norm", "ln_f"),
    *_layer_norm("layers/{i}/attn_norm", "h.{i}.ln_1"),
    *linear("layers/{i}/q", "h.{i}.attn.c_attn", "d (part n h) -> d n h", "(part n h) -> n h", _QUERIES),
    *linear("layers/{i}/k", "h.{i}.attn.c_attn", "d (part n h) -> d n h", "(part n h) -> n h", _KEYS),
    *linear("layers/{i}/v", "h.{i}.attn.c_attn", "d (part n h) -> d n h", "(part n h) -> n h", _VALUES),
    *linear("layers/{i}/o", "h.{i}.attn.c_proj", "(n h) d -> n h d", "d -> d"),
    *_layer_norm("layers/{i}/mlp_norm", "h.{i}.ln_2"),
    *linear("layers/{i}/up", "h.{i}.mlp.c_fc", "d f -> d f", "f -> f"),
    *linear("layers/{i}/down", "h.{i}.mlp.c_proj", "f d -> f d", "d -> d"),
)
_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "exact_gelu", "relu": "relu"}
_WRITTEN = {"gelu": "gelu_new", "exact_gelu": "gelu", "relu": "relu"}


def _written(config: Any) -> Json:
    return {"activation_function": _WRITTEN[config.activation]}


def _gpt2_derived(keys: Json) -> Json:
    return {"activation": _ACTIVATIONS[keys.get("activation_function", "gelu_new")]}


GPT2 = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    "gpt",
    keys=(
        Key("vocab_size", "vocab"),
        Key("n_positions", "positions"),
        Key("n_embd", "hidden"),
        Key("n_layer", "layers"),
        Key("n_head", "heads"),
        Key("n_inner", "ffn", None),
        Key("layer_norm_epsilon", "epsilon", 1e-5),
    ),
    weights=_GPT2,
    only={
        "activation_function": ("gelu_new", *(name for name in _ACTIVATIONS if name != "gelu_new")),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False, True),  # the same numbers in another precision
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    prefixes=("transformer.", ""),
    derived=_gpt2_derived,
    written=_written,
    unused=(r"h\.\d+\.attn\.(masked_)?bias", r"/lm_head\.weight"),
)

_OPT = (
    Weight("embed", "embed_tokens.weight", "v d -> v d"),
    Weight("positions", "embed_positions.weight", "p d -> p d"),
    *_layer_norm("norm", "final_layer_norm"),
    *_layer_norm("layers/{i}/attn_norm", "layers.{i}.self_attn_layer_norm"),
    *linear("layers/{i}/q", "layers.{i}.self_attn.q_proj", "(n h) d -> d n h", "(n h) -> n h"),
    *linear("layers/{i}/k", "layers.{i}.self_attn.k_proj", "(n h) d -> d n h", "(n h) -> n h"),
    *linear("layers/{i}/v", "layers.{i}.self_attn.v_proj", "(n h) d -> d n h", "(n h) -> n h"),
    *linear("layers/{i}/o", "layers.{i}.self_attn.out_proj", "d (n h) -> n h d", "d -> d"),
    *_layer_norm("layers/{i}/mlp_norm", "layers.{i}.final_layer_norm"),
    *linear("layers/{i}/up", "layers.{i}.fc1", "f d -> d f", "f -> f"),
    *linear("layers/{i}/down", "layers.{i}.fc2", "d f -> f d", "d -> d"),
)


def _opt_derived(keys: Json) -> Json:
    narrow = keys.get("word_embed_proj_dim")
    if narrow not in (None, keys.get("hidden_size")):
        raise Unsupported(f"word_embed_proj_dim is {narrow}, and the zoo's embedding is as wide as its layers")
    activation = _ACTIVATIONS[keys.get("activation_function", "relu")]
    return {"first_position": 2, "activation": activation}


OPT = Architecture(
    "opt",
    "OPTForCausalLM",
    "gpt",
    keys=(
        Key("vocab_size", "vocab"),
        Key("max_position_embeddings", "positions"),
        Key("hidden_size", "hidden"),
        Key("num_hidden_layers", "layers"),
        Key("num_attention_heads", "heads"),
        Key("ffn_dim", "ffn"),
    ),
    weights=_OPT,
    only={
        "activation_function": ("relu", *(name for name in _ACTIVATIONS if name != "relu")),
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
        "tie_word_embeddings": (True,),
    },
    prefixes=("model.decoder.", "decoder."),
    derived=_opt_derived,
    derived_keys=("word_embed_proj_dim",),
    written=_written,
    unused=(r"/lm_head\.weight",),
)
