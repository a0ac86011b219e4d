"""The tensors of a checkpoint's safetensors files: their shapes and dtypes, and reading parts of them."""

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from meshwright.errors import CheckpointError
from meshwright.hf.configuration import nearest, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
#: What one handle reads before it is opened again. A file is mapped, and its pages count as this process's memory
#: until the handle is closed.
_MAPPED_BYTES = 2**28


@dataclass(frozen=True)
class Tensor:
    """One tensor: its file, shape and dtype, as the file's header says."""

    file: Path
    shape: tuple[int, ...]
    kind: str

    @property
    def dtype(self) -> np.dtype:
        """The dtype; a `CheckpointError` if it is none of floating point."""
        if self.kind not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise CheckpointError(f"{self.file} holds tensors of {self.kind}, and models of the zoo take {known}")
        return np.dtype(_DTYPES[self.kind])


class Tensors:
    """All tensors of a folder, by name."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._handles = threading.local()

    @cached_property
    def all(self) -> dict[str, Tensor]:
        """Every tensor, as the files' headers and the index say."""
        index = self.folder / INDEX
        if not index.exists():
            return self._headers(self._single())
        names = read_json(index, "model of Hugging Face").get("weight_map", {})
        found = {name: tensor for file in sorted(set(names.values())) for name, tensor in self._headers(file).items()}
        for name, file in names.items():
            if name not in found or found[name].file.name != file:
                raise CheckpointError(f"{index} says that {name} is in {file}, and it is not; download {file} again")
        return found

    def _single(self) -> str:
        if not (self.folder / SINGLE).exists():
            raise CheckpointError(
                f"{self.folder} has neither {SINGLE} nor {INDEX}; weights in other formats, such as pickles, are not "
                "read: convert them with transformers' save_pretrained"
            )
        return SINGLE

    def _headers(self, file: str) -> dict[str, Tensor]:
        path = self.folder / file
        if not path.exists():
            raise CheckpointError(f"{self.folder / INDEX} names {file}, which is missing; download it")
        with opened(path) as shard:
            return {name: _described(path, shard.get_slice(name)) for name in shard.keys()}  # noqa: SIM118

    def read(self, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        """A part of one tensor."""
        tensor = self.all[name]
        handles = self._handles.__dict__
        handle, left = handles.get("open", {}).get(tensor.file, (None, 0))
        if left <= 0:
            handle, left = opened(tensor.file), _MAPPED_BYTES
        part: np.ndarray = handle.get_slice(name)[slices]
        handles["open"] = {tensor.file: (handle, left - max(part.nbytes, 1))}
        return part

    def check_names(self, expected: Iterable[str], unused: Iterable[str], where: str) -> None:
        """Refuses a checkpoint that lacks a tensor, or has one that the model does not."""
        names = set(expected)
        for name in sorted(names - self.all.keys()):
            raise CheckpointError(f"{where} has no tensor {name}{nearest(name, self.all)}; it may be incomplete")
        more = sorted(self.all.keys() - names)
        strange = [name for name in more if not any(re.fullmatch(pattern, name) for pattern in unused)]
        if strange:
            raise CheckpointError(
                f"{where} has {strange[0]}, which the model that its config.json describes does not"
                + (f", and {len(strange) - 1} more such tensors" if len(strange) > 1 else "")
            )


def opened(path: Path) -> Any:
    """An open safetensors file; a `CheckpointError` if it is damaged."""
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or truncated ({error}); download it again") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}; check its permissions") from None


def _described(path: Path, part: Any) -> Tensor:
    return Tensor(path, tuple(part.get_shape()), part.get_dtype())
