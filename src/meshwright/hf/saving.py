"""`mw.hf.save`: writes parameters so that `transformers` loads them, in a folder that is complete or not there."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from safetensors import SafetensorError
from safetensors.numpy import save_file

from meshwright import jax_devices
from meshwright.arrays import PyTree
from meshwright.errors import CheckpointError, OutputError
from meshwright.hf import configuration, tokenizer
from meshwright.hf.architectures.base import SILENT, Architecture, Json
from meshwright.hf.configuration import TOKENS, written_config
from meshwright.hf.files import folder_of, read_json
from meshwright.hf.layout import Place, path_of
from meshwright.hf.model import find_places
from meshwright.hf.tensors import INDEX, SINGLE
from meshwright.runtime.cpu_turns import in_turn
from meshwright.runtime.stages.cutting.layer_stack import LayerStack
from meshwright.training.saving.spread import of_some_processes, spread

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
    others = folder_of(source) if source is not None else None
    before = {} if others is None else read_json(others / configuration.FILE, "model of Hugging Face")
    architecture, keys = written_config(config, before.get("model_type"))
    keys |= {name: value for name, value in before.items() if name in SILENT and name not in keys.keys() - TOKENS}
    parts = _by_tensor(architecture, params)
    keys["dtype"] = keys["torch_dtype"] = str(jax.tree.leaves(params)[0].dtype)
    scratch = folder.with_name(folder.name + ".part")
    output = _Output(folder, scratch)
    output.write(lambda: _begin(folder, scratch))
    _write(output, parts, shard_bytes)
    output.write(lambda: _end(scratch, folder, keys, others))


class _Output:
    """What the first process writes; if it cannot, nothing is left and all processes raise the error."""

    def __init__(self, folder: Path, scratch: Path):
        self._folder, self.scratch = folder, scratch

    def write(self, do: Callable[[], None]) -> None:
        """Does something with files in the first process; all processes must ask together."""
        failure = ""
        if jax.process_index() == 0:
            try:
                do()
            except (OSError, SafetensorError) as error:
                shutil.rmtree(self.scratch, ignore_errors=True)
                reason = getattr(error, "strerror", None) or error
                failure = f"cannot write {self._folder}: {reason}; choose another place"
                failure = str(error) if isinstance(error, OutputError) else failure
        if jax.process_count() > 1:
            failure = jax_devices.broadcast(failure.encode()).decode()
        if failure:
            raise OutputError(failure) from None


def _begin(folder: Path, scratch: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"cannot write {folder}: it is there already; choose another place, or remove it")
    if not folder.parent.is_dir():
        raise OutputError(f"cannot write {folder}: there is no folder {folder.parent}; make it first")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that ended while it wrote
    scratch.mkdir()


def _end(scratch: Path, folder: Path, keys: Json, others: Path | None) -> None:
    """Writes what is beside the weights, and gives the folder its name."""
    _write_json(scratch / configuration.FILE, keys)
    for file in [] if others is None else filter(Path.exists, map(others.joinpath, _COPIED)):
        shutil.copyfile(file, scratch / file.name)
    scratch.replace(folder)


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


def _write(output: _Output, parts: dict[str, list[Part]], shard_bytes: int) -> None:
    """Writes the files, one after the other; all processes give their parts, and one writes."""
    shards = list(_shards(parts, shard_bytes))
    count = len(shards)
    files = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)] if count > 1 else [SINGLE]
    whole = _Whole([parameter for some in parts.values() for _, _, parameter in some])
    for file, names in zip(files, shards, strict=True):
        tensors = _tensors({name: parts[name] for name in names}, whole)
        output.write(partial(save_file, tensors, output.scratch / file, metadata={"format": "pt"}))
    if len(files) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        total = sum(_num_bytes(some) for some in parts.values())
        note = {"metadata": {"total_size": total}, "weight_map": weight_map}
        output.write(partial(_write_json, output.scratch / INDEX, note))


def _write_json(path: Path, data: Json) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


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


def _tensors(parts: dict[str, list[Part]], whole: "_Whole") -> dict[str, np.ndarray]:
    """The tensors of one file; of several processes the first one alone holds them."""
    tensors: dict[str, np.ndarray] = {}
    for name, some in parts.items():
        for place, joined, parameter in some:
            array = whole(parameter)
            if jax.process_index() == 0:
                tensor = tensors.setdefault(name, np.empty(place.tensor_shape, parameter.dtype))
                place.write(tensor, joined, array)
    return tensors


class _Whole:
    """Parameters on the host, of which the last is kept: tensors that are joined in it follow one another.

    Args:
        parameters: All of them; with several processes some may be on the devices of others alone, such as stages'.
    """

    def __init__(self, parameters: list[Any]) -> None:
        self._last: tuple[Any, np.ndarray] | None = None
        partly = of_some_processes(parameters)
        self._of_some = {id(parameter) for parameter, some in zip(parameters, partly, strict=True) if some}

    def __call__(self, parameter: Any) -> np.ndarray:
        if self._last is None or self._last[0] is not parameter:
            self._last = parameter, self._gathered(parameter)
        return self._last[1]

    def _gathered(self, parameter: Any) -> np.ndarray:
        if jax.process_count() == 1 or not isinstance(parameter, jax.Array | LayerStack):
            return np.asarray(parameter)
        array = parameter.array() if isinstance(parameter, LayerStack) else parameter
        array = spread(array) if id(parameter) in self._of_some else array
        if array.is_fully_addressable:  # each process has all of it
            return np.asarray(array)
        return np.asarray(in_turn(process_allgather, jax.devices())(array, tiled=True))
