"""Folders that go away with the process that made them: when it ends or, if it was killed, when the next one looks.

A folder belongs to whoever holds its lock, which the kernel releases with the process. A process number in its name
would not tell: containers that share a folder count their processes apart.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from meshwright.locks import locked_folder


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
        lock = locked_folder(folder)
        if folder.exists():  # another one may look between the two lines above, and remove it
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove(folder: Path) -> None:
    lock = locked_folder(folder)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
