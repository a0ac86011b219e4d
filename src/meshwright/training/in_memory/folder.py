"""The folder in the host's memory that the launcher makes for the processes that it starts; without NumPy.

Linux keeps the files of /dev/shm in memory. The folder is removed when the run is over.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

FOLDER = "MESHWRIGHT_MEMORY"  # the environment variable with the folder
_ROOT = Path("/dev/shm")
_NAME = re.compile(r"meshwright-(\d+)-\w+")  # with the launcher's process number


@contextmanager
def host_memory() -> Iterator[Mapping[str, str]]:
    """The variable that tells processes where to keep copies until the launcher ends; none where there is no place."""
    folder = None
    with suppress(OSError):
        _sweep()
        folder = mkdtemp(prefix=f"meshwright-{os.getpid()}-", dir=_ROOT)
    try:
        yield {FOLDER: folder} if folder else {}
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Removes the folders of launchers that were killed."""
    for folder in _ROOT.glob("meshwright-*"):
        named = _NAME.fullmatch(folder.name)
        if named and not Path(f"/proc/{named[1]}").exists():
            shutil.rmtree(folder, ignore_errors=True)
