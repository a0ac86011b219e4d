"""Reads `config.json` into a `Config` of the zoo, and writes it; whatever is not understood is refused."""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.hf.architectures import ARCHITECTURES, Architecture, Unsupported
from meshwright.hf.architectures.base import REQUIRED, Json
from meshwright.hf.files import CONFIG as FILE
from meshwright.hf.files import read_json
from meshwright.zoo.catalogue import ZooError
from meshwright.zoo.example import check_option
from meshwright.zoo.options import DTYPES

#: Fields of `Config` that are a user's choice: how the model is computed and trained, not which model it is.
OPTIONS = (
    *("attention", "aux_weight", "capacity_factor", "checkpoint", "dropout", "dtype", "group_size", "loss_chunks"),
    "scan",
)

_QUANTISATION, _PACKED = "quantization_config", "mxfp4"

#: Numbers of special tokens, which only the model's source knows.
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_config(folder: Path, options: Mapping[str, Any]) -> tuple[Architecture, Any]:
    """The architecture of a checkpoint and its zoo `Config`, some of whose fields `options` give."""
    keys = read_json(folder / FILE, "model of Hugging Face")
    architecture = _architecture(folder, keys)
    try:
        fields = config_fields(architecture, keys)
    except Unsupported as error:
        raise CheckpointError(f"{folder / FILE}: {error}") from None
    config_class = import_module(f"meshwright.zoo.{architecture.family}").Config
    fields["dtype"] = _dtype(folder, keys)
    _check_options(architecture.model_type, config_class, options)
    return architecture, config_class(**fields | dict(options))


def _check_options(model_type: str, config_class: Any, options: Mapping[str, Any]) -> None:
    fields = {field.name: field for field in dataclasses.fields(config_class) if field.name in OPTIONS}
    for name, value in options.items():
        if name not in fields:
            raise CheckpointError(
                f"{model_type} has no option {name!r}{nearest(name, fields)}; its options are {', '.join(fields)}"
            )
        try:
            check_option(model_type, fields[name], value)
        except ZooError as error:
            raise CheckpointError(str(error)) from None


def _architecture(folder: Path, keys: Json) -> Architecture:
    model_type = keys.get("model_type")
    if model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    near = nearest(str(model_type), ARCHITECTURES)
    known = ", ".join(ARCHITECTURES)
    raise CheckpointError(f"{folder / FILE}: model_type is {model_type!r}{near}, and the zoo has {known}")


def config_fields(architecture: Architecture, keys: Json) -> Json:
    """The fields of a zoo `Config` that the keys of a configuration say."""
    method = _quantisation(keys)
    if method is not None and not (method == _PACKED and architecture.packed):
        raise Unsupported(
            f"the weights are quantised ({method}), and the zoo computes with floating-point weights; dequantise them, "
            "for example by saving the model with transformers in bfloat16"
        )
    unknown = sorted(set(keys) - architecture.known - {_QUANTISATION})
    if unknown:
        raise Unsupported(
            f"the key {unknown[0]!r} is none of {architecture.model_type}{nearest(unknown[0], architecture.known)}; "
            "remove it if the model computes the same without it"
        )
    for name, allowed in architecture.only.items():
        value = keys.get(name, allowed[0])
        if value not in allowed:
            listed = " or ".join(json.dumps(one) for one in allowed)
            raise Unsupported(f"{name} is {json.dumps(value)}, and the zoo's {architecture.family} has {listed}")
    fields = {key.field: keys.get(key.name, key.default) for key in architecture.keys}
    missing = [key.name for key in architecture.keys if fields[key.field] is REQUIRED]
    if missing:
        raise Unsupported(f"the key {missing[0]!r} is missing; download the file again")
    return fields | architecture.derived(keys)


def _quantisation(keys: Json) -> str | None:
    """How the weights are quantised; None if they are not."""
    found = keys.get(_QUANTISATION)
    return None if found is None else str(found.get("quant_method") if isinstance(found, dict) else found)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that is most like another one."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _dtype(folder: Path, keys: Json) -> str:
    """What the model computes in."""
    plain = "float32" if _quantisation(keys) is None else "bfloat16"
    found = keys.get("dtype") or keys.get("torch_dtype") or plain
    if found not in DTYPES:
        raise CheckpointError(f"{folder / FILE}: dtype is {found!r}, and the zoo computes in {', '.join(DTYPES)}")
    return str(found)


def written_config(config: Any, preferred: str | None = None) -> tuple[Architecture, Json]:
    """The architecture that a zoo `Config` is of, and the keys of its configuration.

    Several may have it, as Mistral without windows is a Llama: then it is the one of the preferred `model_type`.
    """
    family = type(config).__module__.rpartition(".")[2]
    of_family = [one for one in ARCHITECTURES.values() if one.family == family]
    if not of_family:
        known = ", ".join(sorted({one.family for one in ARCHITECTURES.values()}))
        raise CheckpointError(f"the zoo's {family} is no architecture of transformers; {known} can be saved")
    for architecture in sorted(of_family, key=lambda one: one.model_type != preferred):
        keys = {key.name: getattr(config, key.field) for key in architecture.keys}
        keys |= {name: allowed[0] for name, allowed in architecture.only.items()} | architecture.written(config)
        try:
            fields = config_fields(architecture, json.loads(json.dumps(keys)))
        except Unsupported:
            continue
        if _same(config, fields):
            tokens = dict.fromkeys(TOKENS)
            about = {"model_type": architecture.model_type, "architectures": [architecture.class_name]}
            return architecture, about | keys | tokens
    names = ", ".join(one.model_type for one in of_family)
    raise CheckpointError(f"no configuration of {names} says what {config} does, so transformers could not load it")


def _same(config: Any, fields: Json) -> bool:
    """Whether fields that were read give a configuration again, but for what is the user's choice."""
    names = {field.name for field in dataclasses.fields(config)}
    chosen = {name: getattr(config, name) for name in OPTIONS if name in names}
    return bool(type(config)(**fields | chosen) == config)
