"""Locks of files between processes, and folders that go away with the process that made them, even if it is killed.

A folder belongs to whoever holds its lock, which the kernel releases with the process. A process number in its name
would not tell: containers that share a folder count their processes apart.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: nobody waits, and things may be done twice
    fcntl = None

HAS_LOCKS = fcntl is not None


@contextmanager
def scratch_folder(purpose: str, root: str | Path | None = None) -> Iterator[Path]:
    """A new folder, which is removed in the end; what killed processes left of the same purpose is removed now.

    Args:
        purpose: A word of its name.
        root: Where it is made; where temporary files go by default.

    Raises:
        OSError: It cannot be made.
    """
    place, prefix = Path(root or gettempdir()), f"meshwright-{purpose}-"
    for left in place.glob(f"{prefix}*"):
        _remove(left)
    while True:
        folder = Path(mkdtemp(prefix=prefix, dir=place))
        lock = _locked(folder)
        if folder.exists():  # another one may look between the two lines above, and remove it
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """The lock on a folder; None where another process has it, or there are no locks."""
    if fcntl is None:
        return None
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
        else:
            return lock
    return None


def _remove(folder: Path) -> None:
    lock = _locked(folder)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def claimed(path: Path | None, patient: bool = True) -> Iterator[bool]:
    """Keeps a file to this process; yields whether it does, and waits until it can if it is patient."""
    if fcntl is None or path is None:
        yield True
        return
    try:
        file = path.open("w")
    except OSError:  # a folder that is gone or cannot be written: nothing is kept there, and nobody else is in the way
        yield True
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if patient else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
