"""The tensors of a checkpoint's safetensors files: their shapes and dtypes, and reading parts of them."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from meshwright.errors import CheckpointError
from meshwright.hf.configuration import nearest
from meshwright.hf.files import read_json
from meshwright.hf.mxfp4 import BLOCK, decoded

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PACKED = "MXFP4"
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_READ_AS = {**_DTYPES, _PACKED: ml_dtypes.bfloat16}  # which holds every number of it
_PARTS = ("_blocks", "_scales")  # of a packed tensor: ends of the names of what the files have
_BLOCK = 2**20  # bytes that are read at a time where not all of them are asked for
_GAP = 2**16  # bytes that are not asked for and are read nevertheless, which is quicker than to read around them


@dataclass(frozen=True)
class Tensor:
    """One tensor: its file, shape, dtype and the position of its first byte, as the file's header says.

    Attributes:
        parts: Of a packed tensor, what the files have instead: blocks of numbers of four bits, and their scales.
    """

    file: Path
    shape: tuple[int, ...]
    kind: str
    offset: int
    parts: "tuple[Tensor, Tensor] | None" = None

    @property
    def dtype(self) -> np.dtype:
        """The dtype that it is read as; a `CheckpointError` if it is none of floating point."""
        if self.kind not in _READ_AS:
            known = ", ".join(_DTYPES)
            raise CheckpointError(f"{self.file} holds tensors of {self.kind}, and models of the zoo take {known}")
        return np.dtype(_READ_AS[self.kind])


class Tensors:
    """All tensors of a folder, by name."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def all(self) -> dict[str, Tensor]:
        """Every tensor, as the files' headers and the index say."""
        index = self.folder / INDEX
        if not index.exists():
            return _unpacked(self._headers(self._single()))
        names = read_json(index, "model of Hugging Face").get("weight_map", {})
        found = {name: tensor for file in sorted(set(names.values())) for name, tensor in self._headers(file).items()}
        for name, file in names.items():
            if name not in found or found[name].file.name != file:
                raise CheckpointError(f"{index} says that {name} is in {file}, and it is not; download {file} again")
        return _unpacked(found)

    @property
    def are_packed(self) -> bool:
        """Whether some have four bits a number."""
        return any(tensor.parts is not None for tensor in self.all.values())

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
        check_file(path)
        with path.open("rb") as shard:
            size = int.from_bytes(shard.read(8), "little")
            header = json.loads(shard.read(size))
        header.pop("__metadata__", None)
        return {
            name: Tensor(path, tuple(one["shape"]), one["dtype"], 8 + size + one["data_offsets"][0])
            for name, one in header.items()
        }

    def fill(self, name: str, slices: tuple[slice, ...], target: np.ndarray) -> None:
        """Reads a part of one tensor into a contiguous array; other bytes of the file are hardly read.

        Files are not mapped: pages that are mapped count as this process's memory, and are read a few at a time.
        """
        tensor = self.all[name]
        box = [part.indices(size)[:2] for part, size in zip(slices, tensor.shape, strict=True)]
        if tensor.parts is None:
            _fill(tensor, box, target)
        else:
            _fill_packed(*tensor.parts, box, target)

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


def _unpacked(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with each pair of blocks and scales as the one that it stands for."""
    tensors = dict(found)
    for name, blocks in found.items():
        plain = name.removesuffix(_PARTS[0])
        scales = found.get(plain + _PARTS[1])
        if plain == name or scales is None or {blocks.kind, scales.kind} != {"U8"}:
            continue
        if blocks.shape != (*scales.shape, BLOCK // 2):
            raise CheckpointError(
                f"{blocks.file}: {name} has shape {blocks.shape}, and that of its scales makes it "
                f"{(*scales.shape, BLOCK // 2)}; download it again"
            )
        del tensors[name], tensors[plain + _PARTS[1]]
        shape = (*scales.shape[:-1], scales.shape[-1] * BLOCK)
        tensors[plain] = Tensor(blocks.file, shape, _PACKED, blocks.offset, (blocks, scales))
    return tensors


def _fill(tensor: Tensor, box: list[tuple[int, int]], target: np.ndarray) -> None:
    """Reads the elements of a box into an array, whose dtype has the size of the tensor's."""
    try:
        with tensor.file.open("rb", buffering=0) as file:
            _fill_from(file, tensor, box, target)
    except OSError as error:
        raise CheckpointError(f"{tensor.file} cannot be read: {error.strerror or error}") from None


def _fill_packed(blocks: Tensor, scales: Tensor, box: list[tuple[int, int]], target: np.ndarray) -> None:
    """Reads the blocks that a box touches, a part of them at a time, and decodes them."""
    counts = [high - low for low, high in box]
    if target.size > _BLOCK:
        dim = next(dim for dim, count in enumerate(counts) if count > 1)
        low, high = box[dim]
        middle = (low + high) // 2
        for part in ((low, middle), (middle, high)):
            half = target[(slice(None),) * dim + (slice(part[0] - low, part[1] - low),)]
            _fill_packed(blocks, scales, [*box[:dim], part, *box[dim + 1 :]], half)
        return
    low, high = box[-1]
    whole = [*box[:-1], (low // BLOCK, -(-high // BLOCK))]
    numbers = np.empty([*counts[:-1], whole[-1][1] - whole[-1][0], BLOCK // 2], np.uint8)
    exponents = np.empty(numbers.shape[:-1], np.uint8)
    _fill(blocks, [*whole, (0, BLOCK // 2)], numbers)
    _fill(scales, whole, exponents)
    first = low - whole[-1][0] * BLOCK
    found = decoded(numbers, exponents)[..., first : first + high - low]
    target.view(np.uint16)[...] = found.view(np.uint16)  # NumPy copies bfloat16 one by one


def _fill_from(file: FileIO, tensor: Tensor, box: list[tuple[int, int]], target: np.ndarray) -> None:
    """Reads the elements of a box: in one go where they follow each other closely, else in halves."""
    width = target.itemsize
    strides = [width * prod(tensor.shape[dim + 1 :]) for dim in range(len(box))]
    counts = [high - low for low, high in box]
    reach = [(count - 1) * stride for count, stride in zip(counts, strides, strict=True)]
    span = sum(reach) + width
    start = tensor.offset + sum(low * stride for (low, _), stride in zip(box, strides, strict=True))
    if target.nbytes == 0:
        return
    assert target.flags.c_contiguous
    if span == target.nbytes:
        _read(file, start, target.reshape(-1).view(np.uint8))
        return
    gaps = (strides[dim] - sum(reach[dim + 1 :]) for dim, count in enumerate(counts) if count > 1)
    if span <= _BLOCK and max(gaps) <= _GAP:
        between = np.empty(span, np.uint8)
        _read(file, start, between)
        bits = np.dtype(f"u{width}")  # NumPy copies bfloat16 one by one
        target.view(bits)[...] = np.ndarray(counts, bits, between, strides=strides)
        return
    dim = next(dim for dim, count in enumerate(counts) if count > 1)
    low, high = box[dim]
    middle = (low + high) // 2
    for part in ((low, middle), (middle, high)):
        half = target[(slice(None),) * dim + (slice(part[0] - low, part[1] - low),)]
        _fill_from(file, tensor, [*box[:dim], part, *box[dim + 1 :]], half)


def _read(file: FileIO, start: int, target: np.ndarray) -> None:
    """Fills bytes with those of a file from a position on."""
    file.seek(start)
    left = memoryview(target.data)
    while left:
        count = file.readinto(left)
        if not count:
            raise CheckpointError(f"{file.name} ends early: it changed while it was read; download it again")
        left = left[count:]


def check_file(path: Path) -> None:
    """Refuses a file that is damaged: a header that is none, or that does not describe the whole file."""
    try:
        safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or truncated ({error}); download it again") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}; check its permissions") from None
