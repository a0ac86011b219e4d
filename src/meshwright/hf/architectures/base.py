"""What an architecture of Hugging Face is here: a map of its configuration and of its tensors to a model of the zoo."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.hf.layout import Pick, Weight

Json = dict[str, Any]

REQUIRED = object()  # the default of a key that a configuration must have

#: Keys that say nothing about what a trained model computes. Dropout is off in models of the zoo.
_SILENT = """
_attn_implementation_autoset _name_or_path architectures attention_dropout attn_pdrop begin_suppress_tokens bos_token_id
cache_implementation chunk_size_feed_forward decoder_start_token_id do_sample dropout dtype embd_pdrop
eos_token_id finetuning_task gradient_checkpointing id2label initializer_range init_std is_decoder is_encoder_decoder
label2id layerdrop max_length max_position_embeddings model_type n_ctx output_attentions output_hidden_states
output_router_logits pad_token_id prefix problem_type resid_pdrop return_dict router_aux_loss_coef
router_jitter_noise sep_token_id summary_activation summary_first_dropout summary_proj_to_labels summary_type
summary_use_proj task_specific_params tokenizer_class torch_dtype torchscript transformers_version unsloth_fixed
unsloth_version use_bfloat16 use_cache
"""
SILENT = frozenset(_SILENT.split())


@dataclass(frozen=True)
class Key:
    """A key of `config.json` whose value is a field of the zoo's `Config`."""

    name: str
    field: str
    default: Any = REQUIRED


@dataclass(frozen=True)
class Architecture:
    """One `model_type`.

    Attributes:
        model_type: As in `config.json`.
        class_name: The class of transformers, which `config.json` names under `architectures`.
        family: The module of `meshwright.zoo`.
        keys: Keys that are fields.
        only: Keys that may have one of a few values, the first of which is what transformers takes for an absent one.
        weights: The map of tensors; those of parameters that a configuration does not have are left out.
        packed: What differs in that map where weights have four bits (MXFP4), whose last dim is the one summed over;
            none where no release has such weights.
        prefixes: What may come before the names of tensors, the one to write first; `name` of a weight has none.
        derived: The fields that follow from several keys, given all keys.
        derived_keys: Names of those keys.
        written: The reverse: those keys for a zoo `Config`.
        unused: Names of tensors, as regular expressions without prefix, that the model does not need.
    """

    model_type: str
    class_name: str
    family: str
    keys: tuple[Key, ...]
    weights: tuple[Weight, ...]
    packed: tuple[Weight, ...] = ()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("",)
    derived: Callable[[Json], Json] = lambda keys: {}
    derived_keys: tuple[str, ...] = ()
    written: Callable[[Any], Json] = lambda config: {}
    unused: tuple[str, ...] = ()

    @property
    def known(self) -> frozenset[str]:
        """All keys that are understood."""
        return frozenset({key.name for key in self.keys} | {*self.only, *self.derived_keys}) | SILENT


def linear(path: str, name: str, layout: str, of_bias: str, pick: Pick | None = None) -> tuple[Weight, Weight]:
    """The weight and the bias of a product, with their layouts."""
    return Weight(path, f"{name}.weight", layout, pick), Weight(f"{path}_bias", f"{name}.bias", of_bias, pick)


class Unsupported(ValueError):
    """A value that no model of the zoo has; the message says which."""
