"""Watches the other processes of this program while it runs: if one ends, all learn of it, with its cause.

The first process's connections to all others, made in `rendezvous.py`, stay open, and a thread in each process listens.
It receives the last message of a process that ends by an error, notices a connection that closes without a message (the
process was killed), and compares the processes' calls (`calls.py`). A failure is passed on through the first process.
The training thread then raises an error at its next step. If it is stuck in a step, because C++ waits for processes
that will not come, the process has to be ended.
"""

import atexit
import json
import logging
import os
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from threading import Event, Lock, Thread, current_thread, main_thread
from typing import Any, NoReturn

from meshwright.errors import ProcessError
from meshwright.runtime.processes.calls import Turns
from meshwright.runtime.processes.rendezvous import send

ENDS_TOO = "ends, too."  # how a process says that it ends since another one has
_TICK_S = 0.5  # between comparisons of the processes' calls


class Peers:
    """The processes that this one runs with.

    Attributes:
        process: Which one this is.
        runs: The program that was called last; a call of another program has to be announced.
        failure: Why the run failed; None as long as it has not.
    """

    def __init__(self, process: int, connections: Mapping[int, socket.socket], heartbeat_s: float):
        self.process = process
        self.runs: Any = None
        self.failure: str | None = None
        self._connections = dict(connections)
        self._patience_s = heartbeat_s / 2  # to leave, and to be found stuck, before JAX ends the process
        self._turns = Turns(process, list(connections))
        self._ended: set[int] = set()
        self._failed = Event()
        self._leave_at = float("inf")
        self._lock = Lock()
        self._speech = Lock()  # of whoever prints why the process ends: neither is cut off by the other
        self._is_over = False
        self._pid = os.getpid()
        self._status: Any = None  # what `sys.exit` was called with
        self._entered = 0, 0.0  # a call, and when it was first seen to be the current one

    def start(self) -> None:
        """Starts to listen, and sends a last message when this process ends."""
        Thread(target=self._listen, name="meshwright-peers", daemon=True).start()
        os.register_at_fork(after_in_child=self._close)  # a child would keep the connections open for its parent
        atexit.register(self._at_exit)
        # The two hooks of `sys` below stay until the process ends: what they report is why it ends. They pass on all.
        before = sys.excepthook

        def last_words(kind: Any, error: BaseException, trace: Any) -> None:
            self._speech.acquire(timeout=self._patience_s)
            before(kind, error, trace)
            said = self._say_last(error)
            if self.failure != said and describe_error(error) not in (self.failure or ""):
                print(self._farewell(), file=sys.stderr)  # the cause, of which this error is a consequence

        sys.excepthook = last_words
        leave = sys.exit

        def noted_exit(status: Any = None) -> NoReturn:
            if current_thread() is main_thread():
                self._status = status
            leave(status)

        sys.exit = noted_exit  # `sys.excepthook` is not called for it

    def enter(self) -> None:
        """Begins a call of a parallelised function.

        Raises:
            ProcessError: Another process ended, or makes another call.
        """
        if self.failure is not None:
            raise ProcessError(self.failure)
        self._turns.num_calls += 1
        self._status = None  # an exit that was called off

    def announce(self, name: str, types: Mapping[str, str], *, is_next: bool = False) -> None:
        """Announces the current call, or an action that comes before the next one."""
        message = self._turns.take(name, types, is_next=is_next)
        if message is not None:
            self._tell({"turn": message})

    def fail(self, sentence: str, *, at_once: bool = False) -> None:
        """Ends the run in all processes; this one raises an error, or is ended."""
        with self._lock:
            if self.failure is not None or self._is_over:
                return
            self.failure = sentence
            self._leave_at = time.monotonic() + (0 if at_once else self._patience_s)
        self._tell({"failed": [sentence, at_once]})
        self._failed.set()

    def end(self) -> None:
        """Tells the others that this process makes no more calls; from then on it does not mind their end either."""
        if not self._is_over:
            self._is_over = True
            self._tell({"end": self._turns.num_calls})

    def _tell(self, message: Any) -> None:
        with self._lock:
            for connection in self._connections.values():
                send(connection, message)

    def _listen(self) -> None:
        texts = dict.fromkeys(self._connections, b"")
        with selectors.DefaultSelector() as selector:
            for peer, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            while True:
                for key, _ in selector.select(_TICK_S):
                    peer = key.data
                    received = _receive(self._connections[peer])
                    *lines, texts[peer] = (texts[peer] + received).split(b"\n")
                    for line in lines:
                        self._hear(peer, json.loads(line))
                    if not received:
                        selector.unregister(self._connections[peer])
                        self._lose(peer)
                self._compare()
                if time.monotonic() >= self._leave_at:
                    self._leave()

    def _hear(self, peer: int, message: Mapping[str, Any]) -> None:
        if "turn" in message:
            self._turns.hear(peer, message["turn"])
        elif "end" in message:
            self._ended.add(peer)
            self._turns.end(peer, message["end"])
        elif "failed" in message:
            sentence, at_once = message["failed"]
            self._ended.add(peer)
            self.fail(sentence, at_once=at_once)

    def _lose(self, peer: int) -> None:
        if peer not in self._ended:
            self.fail(
                f"process {peer} was killed or crashed, or its host was lost; its own output may say why", at_once=True
            )

    def _compare(self) -> None:
        now, call = time.monotonic(), self._turns.num_calls
        if call != self._entered[0]:
            self._entered = call, now
        is_stuck = now - self._entered[1] > self._patience_s
        difference = self._turns.differ(stuck_at=call if is_stuck else 0)
        if difference is not None:
            self.fail(f"{difference}; all processes must call the same functions with the same types", at_once=is_stuck)

    def _say_last(self, error: BaseException) -> str:
        """Reports an error that ends this process to the others, unless their failure caused it."""
        if isinstance(error, KeyboardInterrupt):
            return self._fail_here("was interrupted")
        self._failed.wait(self._patience_s / 2)  # its cause may be another process whose loss is noticed soon
        return self._fail_here(f"ended with {describe_error(error)}")

    def _fail_here(self, how: str) -> str:
        said = f"process {self.process} {how}"
        self.fail(said)
        return said

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        code = exit_code(self._status)
        if code:
            self._failed.wait(self._patience_s / 2)  # as above
            self._fail_here(f"ended with exit code {code}")
        if self.failure is not None:  # JAX would wait for the others, which have ended
            end_process(code or 1)
        self.end()

    def _leave(self) -> None:
        self._speech.acquire(timeout=self._patience_s)
        print(self._farewell(), file=sys.stderr, flush=True)
        end_process()

    def _farewell(self) -> str:
        return f"meshwright: {self.failure}. So process {self.process} {ENDS_TOO}"

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()


def describe_error(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    said = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {said:.300}" if said else type(error).__name__


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(2**16)
    except OSError:  # reset, or no answer from the host
        return b""


def exit_code(status: Any) -> int:
    """The exit code of a process that ends by `sys.exit(status)`."""
    return status % 256 if isinstance(status, int) else 0 if status is None else 1


def end_process(code: int = 1) -> None:
    """Ends the process at once, which nothing else can do while C++ waits."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


current: Peers | None = None
"""The peers of this process, where `mw.initialize` found some."""
