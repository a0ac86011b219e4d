"""Locks of files and folders between processes, which the kernel releases with the process that has them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: nobody waits, and things may be done twice
    fcntl = None

HAS_LOCKS = fcntl is not None


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


def locked_folder(folder: Path) -> int | None:
    """The lock on a folder, to be closed by `os.close`; None where another process has it, or there are no locks."""
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
