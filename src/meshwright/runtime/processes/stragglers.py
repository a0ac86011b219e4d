"""Finds the process that slows all others, and what it does meanwhile.

All processes end a step together, since they wait for each other in it. They do not begin the next one together: a
process may first be busy with its loader, its files, or a host that others use, and devices that have nothing to do
wait for it. So each process measures how long after the end of a call it begins the next one, without what it waits for
batches that others are late with. No clocks of different hosts are compared. A slow device is not found in this way:
others wait for it within the program.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from meshwright.runtime.processes.stalls import stacks

SLOWS = 0.2  # of the time of a step that a process adds to it: what is named
_CALLS = 16  # whose median counts, so that a pause now and then does not
_LEAST_S = 5e-3  # of a step; less is what an operating system may take from any process


class Figures(NamedTuple):
    """The median call of a process.

    Attributes:
        own_s: For how long its devices wait for the process before the call.
        step_s: From one call to the next.
    """

    own_s: float
    step_s: float


class Pace:
    """How this process goes from call to call."""

    def __init__(self) -> None:
        self._calls: deque[Figures] = deque(maxlen=_CALLS)
        self._begun_at = 0.0
        self._ended = 0.0, 0.0  # when a call began, and when it ended
        self._waited_s = self._fetched_s = 0.0
        self._results: SimpleQueue[Any] | None = None
        self._report: Callable[[list[str]], None] | None = None

    def begin(self, now: float) -> None:
        """Begins a call."""
        began, (call, ended) = self._begun_at, self._ended
        gap_s = now - ended if call == began else 0.0  # otherwise the call before has not ended: nothing waits
        waited_s = min(self._waited_s, gap_s)
        if began:
            # Of a wait for a batch only what this process took to fetch it is its own.
            self._calls.append(Figures(gap_s - waited_s + min(waited_s, self._fetched_s), now - began))
        self._begun_at, self._waited_s = now, 0.0

    def end(self, result: Any) -> None:
        """Waits in the background until the call that was begun last has ended: the last array of its result tells."""
        while isinstance(result, tuple | list | dict) and result:
            result = list(result.values())[-1] if isinstance(result, dict) else result[-1]
        import jax  # here, since the launcher reads this module, and starts without it

        if not isinstance(result, jax.Array):
            return
        if self._results is None:
            self._results = SimpleQueue()
            Thread(target=self._watch, name="meshwright-pace", daemon=True).start()
        self._results.put((self._begun_at, result))

    def ended(self, began: float, now: float) -> None:
        """Notes that the call that was begun at some time has ended."""
        self._ended = began, now

    def waited(self, seconds: float) -> None:
        """Adds time for which the program waited for a batch."""
        self._waited_s += seconds

    def fetched(self, seconds: float) -> None:
        """Notes how long this process took to fetch a batch."""
        self._fetched_s = seconds

    def figures(self) -> Figures | None:
        """The median of the last calls; None as long as there are too few."""
        calls = list(self._calls)
        if len(calls) < _CALLS:
            return None
        return Figures(*(statistics.median(part) for part in zip(*calls, strict=True)))

    def ask(self, report: Callable[[list[str]], None]) -> None:
        """Reports the stacks of the next moment in which devices wait for this process."""
        self._report = report

    def _watch(self) -> None:
        assert self._results is not None
        while True:
            began, result = self._results.get()
            with suppress(Exception):  # it was donated, or its program failed, which the thread that called it raises
                result.block_until_ready()
                self.ended(began, time.perf_counter())
            report, figures = self._report, self.figures()
            if report is not None and figures is not None:
                time.sleep(figures.own_s / 2)
                if self._begun_at == began:
                    self._report = None
                    report(stacks())


class Stragglers:
    """What the first process knows of the pace of all."""

    def __init__(self) -> None:
        self._named: set[int] = set()

    def found(self, paces: Mapping[int, Figures], ended: Collection[int]) -> Iterator[tuple[int, float, float]]:
        """The processes that have become stragglers: what each adds to a step, and the step with it."""
        running = {process: pace for process, pace in paces.items() if process not in ended}
        for process, pace in running.items():
            others = [other.own_s for number, other in running.items() if number != process]
            added_s = pace.own_s - statistics.median(others) if others else 0.0
            if added_s < max(_LEAST_S, SLOWS * (pace.step_s - added_s)):
                self._named.discard(process)
            elif process not in self._named:
                self._named.add(process)
                yield process, added_s, pace.step_s


def sentence(process: int, added_s: float, step_s: float) -> str:
    """What is said of a straggler."""
    each = f"{1e3 * added_s:.0f} ms of each step, which takes {1e3 * step_s:.0f}"
    return f"meshwright: process {process} slows the others: they wait for it for {each}"
