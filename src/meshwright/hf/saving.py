"""`mw.hf.save`: writes parameters so that `transformers` loads them, in a folder that is complete or not there."""

import json
import shutil
from collections.abc import Iterator
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather, sync_global_devices
from safetensors import SafetensorError
from safetensors.numpy import save_file

from meshwright.errors import CheckpointError, OutputError
from meshwright.hf import configuration, tokenizer
from meshwright.hf.architectures.base import Architecture, Json
from meshwright.hf.configuration import folder_of, read_json, written_config
from meshwright.hf.layout import Place, path_of
from meshwright.hf.model import find_places
from meshwright.hf.tensors import INDEX, SINGLE

PyTree = Any
_COPIED = (tokenizer.FILE, tokenizer.SETTINGS, tokenizer.TEMPLATE, "generation_config.json", "special_tokens_map.json")
Part = tuple[Place, dict[str, int], Any]  # a place of a parameter, the tensor's joined indices, and the parameter


def save(
    path: str | PathLike[str],
    params: PyTree,
    config: Any,
    *,
    source: str | PathLike[str] | None = None,
    shard_bytes: int = 4 * 10**9,
) -> None:
    """Writes parameters as a model of Hugging Face: `config.json` and safetensors, in several files if they are large.

    With several processes all of them must call it; the first one writes.

    Args:
        path: The folder to write, which must not exist or be empty. It appears once everything is written.
        params: Parameters, such as a model's or those of a trained state; each keeps its dtype.
        config: The zoo's `Config`, such as a model's.
        source: The folder of the model that they come from. Its tokenizer is copied, and so are the keys of its
            configuration that say nothing about the weights, such as the numbers of special tokens.
        shard_bytes: The largest size of one file, all of which is in the host's memory while it is written. A larger
            tensor has a file of its own.

    Raises:
        OutputError: The folder cannot be written; nothing of it is left.
        CheckpointError: No architecture of transformers has such parameters.

    Examples:
        >>> import os, tempfile, meshwright as mw
        >>> from meshwright import zoo
        >>> tiny = zoo.build("gpt-tiny", layers=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mw.hf.save(f"{folder}/tiny", tiny.init(0)["params"], tiny.config)
        ...     sorted(os.listdir(f"{folder}/tiny"))
        ['config.json', 'model.safetensors']
    """
    folder = Path(path).expanduser()
    architecture, keys = written_config(config)
    others = folder_of(source) if source is not None else None
    if others is not None:
        keys = _with_silent(keys, read_json(others / configuration.FILE, "model of Hugging Face"), architecture)
    parts = _by_tensor(architecture, params)
    keys["dtype"] = keys["torch_dtype"] = str(jax.tree.leaves(params)[0].dtype)
    writes = jax.process_index() == 0
    scratch = folder.with_name(folder.name + ".part")
    try:
        if writes:
            _begin(folder, scratch)
        _write(scratch, parts, shard_bytes, writes)
        if writes:
            (scratch / configuration.FILE).write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
            for file in [] if others is None else filter(Path.exists, map(others.joinpath, _COPIED)):
                shutil.copyfile(file, scratch / file.name)
            scratch.replace(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(error, OutputError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"cannot write {folder}: {reason}; choose another place") from None
    if jax.process_count() > 1:
        sync_global_devices(f"saved {folder}")


def _begin(folder: Path, scratch: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"cannot write {folder}: it is there already; choose another place, or remove it")
    if not folder.parent.is_dir():
        raise OutputError(f"cannot write {folder}: there is no folder {folder.parent}; make it first")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that ended while it wrote
    scratch.mkdir()


def _with_silent(keys: Json, other: Json, architecture: Architecture) -> Json:
    """The keys, with those of another configuration that say nothing about the weights."""
    own = {*(key.name for key in architecture.keys), *architecture.only, *architecture.derived_keys, "model_type"}
    return keys | {name: value for name, value in other.items() if name not in own}


def _by_tensor(architecture: Architecture, params: PyTree) -> dict[str, list[Part]]:
    """What each tensor consists of."""
    try:
        places = find_places(architecture, params, None)
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"params are none of the zoo's {architecture.family}: {error} has no place in {architecture.model_type}"
        ) from None
    parts: dict[str, list[Part]] = {}
    leaves = {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    for place in places:
        for name, joined in place.tensors():
            parts.setdefault(name, []).append((place, joined, leaves[place.path]))
    return parts


def _write(scratch: Path, parts: dict[str, list[Part]], shard_bytes: int, writes: bool) -> None:
    """Writes the files, one after the other; all processes give their parts, and one writes."""
    shards = list(_shards(parts, shard_bytes))
    files = [SINGLE] if len(shards) == 1 else [_file(number, len(shards)) for number in range(len(shards))]
    whole = _Whole()
    for file, names in zip(files, shards, strict=True):
        tensors = {name: _tensor(parts[name], whole) for name in names}
        if writes:
            save_file(tensors, scratch / file, metadata={"format": "pt"})
    if writes and len(files) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        total = sum(_num_bytes(some) for some in parts.values())
        note = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (scratch / INDEX).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def _file(number: int, count: int) -> str:
    return f"model-{number + 1:05}-of-{count:05}.safetensors"


def _shards(parts: dict[str, list[Part]], shard_bytes: int) -> Iterator[list[str]]:
    """The names of the tensors of each file."""
    names: list[str] = []
    size = 0
    for name, some in parts.items():
        if names and size + _num_bytes(some) > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += _num_bytes(some)
    yield names


def _num_bytes(parts: list[Part]) -> int:
    place, _, parameter = parts[0]
    return prod(place.tensor_shape) * np.dtype(parameter.dtype).itemsize


def _tensor(parts: list[Part], whole: "_Whole") -> np.ndarray:
    tensor = np.empty(parts[0][0].tensor_shape, parts[0][2].dtype)
    for place, joined, parameter in parts:
        place.write(tensor, joined, whole(parameter))
    return tensor


class _Whole:
    """Parameters on the host, of which the last is kept: tensors that are joined in it follow one another."""

    def __init__(self) -> None:
        self.last: tuple[Any, np.ndarray] | None = None

    def __call__(self, parameter: Any) -> np.ndarray:
        if self.last is None or self.last[0] is not parameter:
            here = not isinstance(parameter, jax.Array) or parameter.is_fully_addressable
            self.last = parameter, np.asarray(parameter if here else process_allgather(parameter, tiled=True))
        return self.last[1]
