"""Pieces of arrays in files of the host's memory, where they outlive the process that wrote them; without JAX.

The launcher makes their folder (`folder.py`). A checkpoint is one file with the pieces' bytes, and one with what they
are, for each process; the latter is written last, so that what is there is whole.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from meshwright.training.in_memory.folder import FOLDER

Box = tuple[tuple[int, int], ...]  # start and stop along each dim
Key = tuple[str, Box]  # the path of an array, and the part of it

_ALIGNED = 64  # bytes: any dtype can be read there
_SHARE = 4  # copies take at most a quarter of the host's memory: the rest is the program's and its loader's


def write(directory: str, step: int, process: int, checksum: str, pieces: Sequence[tuple[Key, np.ndarray]]) -> None:
    """Keeps what a process has of a checkpoint, if there is room for it.

    Args:
        directory: The checkpoint's.
        step: Its step.
        process: The process.
        checksum: Of the checkpoint's list of leaves: what is kept is of this checkpoint and no other.
        pieces: Parts of arrays.
    """
    folder = _folder(directory)
    if folder is None:
        return
    folder.mkdir(exist_ok=True)
    num_bytes = sum(piece.nbytes for _, piece in pieces)
    if _used(folder.parent) + num_bytes > _total() // _SHARE:
        return
    data, told = folder / f"{step}-{process}.data", folder / f"{step}-{process}.json"
    notes, at = [], 0
    try:
        told.unlink(missing_ok=True)
        with data.open("wb") as file:
            for (path, box), piece in pieces:
                notes.append([path, box, at])
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
                at = -(-file.tell() // _ALIGNED) * _ALIGNED
                file.seek(at)
            file.truncate(max(at, 1))
        part = told.with_suffix(".part")
        part.write_text(json.dumps({"checksum": checksum, "pieces": notes}))
        part.rename(told)
    except OSError:  # the memory is full: the checkpoint is on disk all the same
        with suppress(OSError):
            data.unlink(missing_ok=True)


def read(directory: str, step: int, checksum: str) -> dict[Key, memoryview]:
    """What this host has of a checkpoint: for each piece the bytes from its first one on."""
    folder = _folder(directory)
    found: dict[Key, memoryview] = {}
    for told in sorted(folder.glob(f"{step}-*.json")) if folder is not None else ():
        with suppress(OSError, ValueError, KeyError):
            note = json.loads(told.read_text())
            with told.with_suffix(".data").open("rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            if note["checksum"] == checksum:
                found |= {(path, tuple(map(tuple, box))): data[at:] for path, box, at in note["pieces"]}
    return found


def forget_older(directory: str, step: int) -> None:
    """Removes what is kept of earlier steps, once a checkpoint is complete on disk."""
    folder = _folder(directory)
    for file in folder.glob("*") if folder is not None else ():
        if int(file.name.split("-")[0]) < step:
            file.unlink(missing_ok=True)


def _folder(directory: str) -> Path | None:
    root = os.environ.get(FOLDER)
    return Path(root, hashlib.sha256(directory.encode()).hexdigest()[:16]) if root and Path(root).is_dir() else None


def _used(root: Path) -> int:
    return sum(file.stat().st_size for file in root.glob("*/*.data"))


def _total() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
