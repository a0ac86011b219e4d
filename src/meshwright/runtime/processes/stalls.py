"""Finds the process that keeps the others waiting, and what it is doing.

Each process tells the first one how many calls of parallelised functions it has begun, and how many batches it has
fetched, whenever that has changed. One that stands still while others are ahead of it is what they wait for: it is
stopped, or stuck in its loader, in a lock, in code that only it runs. Long steps and compilations are the same in all
processes, so that none of them is behind.
"""

import sys
import threading
import traceback
from collections.abc import Collection, Iterator

from meshwright.runtime.processes.tree import ancestors

DEADLINE = "MESHWRIGHT_DEADLINE"  # the environment variable with the seconds until a stalled process is named
Counts = tuple[int, int]  # calls begun, batches fetched
_FRAMES = 8  # of each stack, the innermost
_THREADING = threading.__file__  # whose frames are those of every thread
_THREADS = ("MainThread", "meshwright-batches")  # those that run the user's code


class Stalls:
    """What the first process knows of the progress of all.

    Args:
        deadline_s: Seconds after which a process that is behind and stands still counts as stalled.

    Attributes:
        counts: How far each process is.
    """

    def __init__(self, deadline_s: float):
        self._deadline_s = deadline_s
        self.counts: dict[int, Counts] = {}
        self._behind_since: dict[int, float] = {}
        self._said: set[int] = set()

    def note(self, process: int, counts: Counts) -> None:
        """Records how far a process is."""
        if self.counts.get(process) != counts:
            self.counts[process] = counts
            self._behind_since.pop(process, None)
            self._said.discard(process)

    def found(self, now: float, ended: Collection[int]) -> Iterator[tuple[int, float]]:
        """The processes that have become stalled, each once, and for how many seconds they have been behind."""
        counts = {process: own for process, own in self.counts.items() if process not in ended}
        furthest = [max(some) for some in zip(*counts.values(), strict=True)]
        behind = {process for process, own in counts.items() if any(map(int.__lt__, own, furthest))}
        for process in counts:
            # What is known of those below a process came through it: where it stands still, they seem to.
            if process not in behind or not behind.isdisjoint(ancestors(process)):
                self._behind_since.pop(process, None)
                continue
            seconds = now - self._behind_since.setdefault(process, now)
            if seconds >= self._deadline_s and process not in self._said:
                self._said.add(process)
                yield process, seconds

    def longest_s(self, now: float) -> tuple[int, float]:
        """The process that has been behind for longest, and for how many seconds."""
        process = min(self._behind_since, key=self._behind_since.__getitem__, default=-1)
        return process, now - self._behind_since.get(process, now)


def stacks() -> list[str]:
    """The innermost frames of the threads that run the user's code, the outermost first."""
    frames = sys._current_frames()
    lines = []
    for thread in threading.enumerate():
        if thread.name not in _THREADS or thread.ident not in frames:
            continue
        lines.append(f"  {thread.name}:")
        entries = [frame for frame in traceback.extract_stack(frames[thread.ident]) if frame.filename != _THREADING]
        lines += [f"    {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in entries[-_FRAMES:]]
    return lines
