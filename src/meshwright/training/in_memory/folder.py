"""The folder in the host's memory that the launcher makes for the processes that it starts; without NumPy.

Linux keeps the files of /dev/shm in memory. The folder is removed when the run is over.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from meshwright.scratch import scratch_folder

FOLDER = "MESHWRIGHT_MEMORY"  # the environment variable with the folder


@contextmanager
def host_memory() -> Iterator[Mapping[str, str]]:
    """The variable that tells processes where to keep copies until the launcher ends; none where there is no place."""
    told: dict[str, str] = {}
    with ExitStack() as stack:
        with suppress(OSError):
            told[FOLDER] = str(stack.enter_context(scratch_folder("memory", "/dev/shm")))
        yield told
