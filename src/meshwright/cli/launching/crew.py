"""Processes that run, print and end together: output with the process's number, signals passed on, one cause named."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, BinaryIO

from meshwright.cli.console import note
from meshwright.runtime.processes.peers import ENDS_TOO

_TICK_S = 0.2  # between looks at the clock
_FAILED_S = 10.0  # for the others to end after one failed: those that `mw.initialize` connected take seconds
_TAIL_S = 1.0  # for the last lines of a process that ended; its own children may keep its output open for ever
_LAST_LINES = 10
# How a process says that it ends since another one has: by `mw.initialize`, and by JAX where that was quicker.
_CONSEQUENCES = (ENDS_TOO.encode(), b"the JAX distributed service detected fatal errors")
# What Gloo prints of every communicator. Its threads may tear each other's lines, so any mixture of the parts counts.
_CONNECTED = re.compile(
    rb"(?=.*(\[Gloo\]|peer ranks))"
    rb"(\[Gloo\] Rank |\d+| is connected to | peer ranks\. Expected number of connected peer ranks is : |\s)+"
)
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG of Linux
_WRONG_USE = 2  # the exit code of commands whose settings are wrong
# Errors that the same program meets again on the same devices. What ended another process's batches may be transient.
_PERMANENT = re.compile(
    r"meshwright\.errors\.(?!ProcessError|CheckpointError|OutputError)\w+: (?!the batches of process )"
)


@dataclass(frozen=True)
class Ending:
    """How the processes of one host ended.

    Attributes:
        code: 0 if all ended well; otherwise the exit code of the one that failed first, as a shell has it.
        said: Which one that was, how it ended, and its last lines; empty where a signal ended the run.
        is_permanent: Whether it failed by an error that it would meet again, such as a plan that cannot be made.
        is_consequence: Whether it ended since another process had, perhaps on another host.
    """

    code: int
    said: tuple[str, ...] = ()
    is_permanent: bool = False
    is_consequence: bool = False

    def explain(self) -> None:
        """Says which process failed first, and how."""
        for number, line in enumerate(self.said):
            note(line if number else f"meshwright launch: {line}")


class Crew:
    """The processes that run on this host.

    Args:
        command: What each process runs.
        settings: The environment of each process.
        grace_s: How long processes have to end after SIGTERM or Ctrl-C.
        first: The number of the first one among all processes of the run.
        count: How many processes the run has on all hosts; by default those of this host.

    Attributes:
        is_stopped: Whether a signal ended the run.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Sequence[Mapping[str, str]],
        grace_s: float,
        first: int = 0,
        count: int | None = None,
    ):
        self.is_stopped = self._is_asked = False
        self._first, self._count = first, len(settings) if count is None else count
        self._grace_s, self._after_failure_s = grace_s, min(grace_s, _FAILED_S)
        self._kill_at = float("inf")
        self._printing = Lock()
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._last: list[deque[str]] = [deque(maxlen=_LAST_LINES) for _ in settings]
        self._followed: set[int] = set()  # processes that said that they end since another one has
        prepare = _ending_with_parent()
        self._children = [
            subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on once
                preexec_fn=prepare,
            )
            for environment in settings
        ]

    def run(self) -> Ending:
        """Waits for all processes."""
        before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for process in range(len(self._children)):
                Thread(target=self._watch, args=(process,), daemon=True).start()
            return self._wait()
        finally:
            for child in self._children:
                child.kill()
            for number, handler in before.items():
                signal.signal(number, handler)

    def end(self, number: int) -> None:
        """Sends all processes a signal; those that do not heed it in time are killed."""
        self._is_asked = True
        self._kill_at = min(self._kill_at, time.monotonic() + self._grace_s)
        for child in self._children:
            if child.returncode is None:
                child.send_signal(number)

    def kill_later(self) -> None:
        """Kills those that do not end by themselves, as processes do that learn of the failure of another one."""
        self._kill_at = min(self._kill_at, time.monotonic() + self._after_failure_s)

    def _wait(self) -> Ending:
        waiting = set(range(len(self._children)))
        failed: list[int] = []
        while waiting:
            try:
                ended = [self._ended.get(timeout=_TICK_S)]
                while not self._ended.empty():
                    ended.append(self._ended.get())
            except Empty:
                ended = []
            waiting -= set(ended)
            # Of several that end at once, the killed one is the cause: the others noticed that its connection closed.
            bad = sorted((p for p in ended if self._children[p].returncode), key=lambda p: self._children[p].returncode)
            if bad and not failed:
                self._kill_at = min(self._kill_at, time.monotonic() + self._after_failure_s)
                stopped = [p for p in sorted(waiting) if _is_stopped(self._children[p].pid)]
                if stopped and not self.is_stopped:
                    return self._end_stopped(stopped[0])
            failed += bad
            if waiting and time.monotonic() >= self._kill_at:
                self._kill(sorted(waiting))
        if not failed:
            return Ending(0)
        first = next((process for process in failed if process not in self._followed), failed[0])
        code = self._children[first].returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        return Ending(
            128 - code if code < 0 else code,
            () if self.is_stopped else self._said(first, how),
            is_permanent=code == _WRONG_USE or any(map(_PERMANENT.match, self._last[first])),
            is_consequence=first in self._followed,
        )

    def _end_stopped(self, process: int) -> Ending:
        """Names a process that was stopped, for which the others waited in vain; all are killed."""
        time.sleep(_TICK_S)  # until what it printed before is read
        said = self._said(process, "was stopped (SIGSTOP), and the others waited for it in vain")
        return Ending(128 + signal.SIGSTOP, said)

    def _watch(self, process: int) -> None:
        """Prints what a process prints, until it ends."""
        child = self._children[process]
        streams = ((child.stdout, sys.stdout), (child.stderr, sys.stderr))
        printers = [Thread(target=self._print, args=(process, *pair), daemon=True) for pair in streams]
        for printer in printers:
            printer.start()
        child.wait()
        for printer in printers:
            printer.join(_TAIL_S)
        self._ended.put(process)

    def _print(self, process: int, stream: Any, target: Any) -> None:
        out: BinaryIO = target.buffer
        for line in iter(stream.readline, b""):
            if _CONNECTED.fullmatch(line):
                continue
            if any(text in line for text in _CONSEQUENCES):
                self._followed.add(process)
            self._last[process].append(line.decode("utf-8", "replace").rstrip())
            with self._printing:
                try:
                    out.write(b"[%d] %s\n" % (self._first + process, line.rstrip(b"\r\n")))
                    out.flush()
                except OSError:  # nobody reads any more, as in `meshwright launch … | head`
                    if not self.is_stopped:
                        self._pass_on(signal.SIGTERM, None)

    def _pass_on(self, number: int, _: Any) -> None:
        """Passes a signal on to all processes; a second one kills them."""
        self._kill_at = 0.0 if self.is_stopped else time.monotonic() + self._grace_s
        self.is_stopped = True
        self.end(number)

    def _kill(self, processes: list[int]) -> None:
        numbers = ", ".join(str(self._first + process) for process in processes)
        named = f"process{'es' if len(processes) > 1 else ''} {numbers}"
        advice = "a loop that calls mw.preempted() saves its state and ends in time"
        after = f"{self._grace_s:g} s after the signal; {advice}"
        since = after if self._is_asked else f"{self._after_failure_s:g} s after another one failed"
        note(f"meshwright launch: killed {named}, still running {since}")
        self._kill_at = float("inf")
        for process in processes:
            self._children[process].kill()

    def _said(self, process: int, how: str) -> tuple[str, ...]:
        head = f"process {self._first + process} of {self._count} {how}; its last lines:"
        return head, *(f"    {line}" for line in self._last[process] or ["(it printed nothing)"])


def _is_stopped(pid: int) -> bool:
    """Whether a child is stopped by a signal, as by SIGSTOP, until somebody continues it."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended
        return False


def _ending_with_parent() -> Callable[[], None] | None:
    """What a child does first, so that it is killed with its parent; None where the system has no such thing."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        library.prctl(_PARENT_DEATH, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)

    return prepare
