"""Watches the other processes of this program while it runs: if one ends, all learn of it, with its cause.

The connections to the neighbours in the tree, made in `rendezvous.py`, stay open, and a thread in each process listens.
It receives the last message of a process that ends by an error, notices a connection that closes without a message (the
process was killed), and compares its neighbours' calls with its own (`calls.py`): where all neighbours call the same,
all do. A failure is passed on from neighbour to neighbour. The training thread then raises an error at its next step.
If it is stuck in a step, because C++ waits for processes that will not come, the process has to be ended. The first
process learns how far all others are; one that keeps the others waiting (`stalls.py`) is named in all of them with what
it is doing, and ends the run if it does not continue. One that slows them (`stragglers.py`) is named.
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
from meshwright.runtime.processes.connections import send
from meshwright.runtime.processes.stalls import Counts, Stalls, stacks
from meshwright.runtime.processes.stragglers import Figures, Pace, Stragglers, sentence
from meshwright.runtime.processes.tree import next_hop, parent

ENDS_TOO = "ends, too."  # how a process says that it ends since another one has
DEADLINE_S = 60.0  # after which a process that keeps the others waiting is named
_TICK_S = 0.5  # between comparisons of the processes' calls
_PACE_S = 2.0  # between messages about how fast this process is
_ANSWER_S = 3.0  # for a process to say what it is doing
_STALLED = 10  # deadlines after which a process that stands still ends the run


class Peers:
    """The processes that this one runs with.

    Args:
        process: Which one this is.
        connections: Those to its neighbours, by process.
        heartbeat_s: Seconds after which JAX ends a process that does not answer.
        deadline_s: Seconds after which a process that keeps the others waiting is named.

    Attributes:
        process: Which one this is.
        runs: The program that was called last; a call of another program has to be announced.
        num_batches: How many batches this process has fetched.
        failure: Why the run failed; None as long as it has not.
        pace: How long others wait for this process between calls.
    """

    def __init__(
        self,
        process: int,
        connections: Mapping[int, socket.socket],
        heartbeat_s: float,
        deadline_s: float = DEADLINE_S,
    ):
        self.process = process
        self.runs: Any = None
        self.num_batches = 0
        self.failure: str | None = None
        self.pace = Pace()
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
        self._stalls, self._deadline_s = Stalls(deadline_s), deadline_s
        self._told: Counts | None = None
        self._news: dict[str, dict[int, Any]] = {}  # of this process and those below, not yet told to the parent
        self._paces: dict[int, Figures] = {}
        self._stragglers, self._told_pace = Stragglers(), float("-inf")
        self._asked: dict[int, tuple[float, float]] = {}  # who was asked what it does: when, and for how long it stood

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
        self.pace.begin(time.perf_counter())
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
            self._tell({"end": [self.process, self._turns.num_calls]})

    def _tell(self, message: Any, but: int | None = None) -> None:
        """Sends a message to the neighbours; ``but``: the one that it came from."""
        with self._lock:
            for peer, connection in self._connections.items():
                if peer != but:
                    send(connection, message)

    def _send(self, to: int, message: Any) -> None:
        """Sends a message towards another process: the first one, or one below this one."""
        with self._lock:
            send(self._connections[next_hop(self.process, to) if to else parent(self.process)], message)

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
                self._watch()
                if time.monotonic() >= self._leave_at:
                    self._leave()

    def _hear(self, peer: int, message: Mapping[str, Any]) -> None:
        if "turn" in message:
            self._turns.hear(peer, message["turn"])
        elif "end" in message:
            process, num_calls = message["end"]
            self._ended.add(process)
            if process == peer:
                self._turns.end(peer, num_calls)
            if self.process and peer > self.process:
                self._send(0, message)
        elif "stalled" in message:
            print(message["stalled"], file=sys.stderr, flush=True)
            self._tell(message, but=peer)
        elif "failed" in message:
            sentence, at_once = message["failed"]
            self._ended.add(peer)
            self.fail(sentence, at_once=at_once)
        elif "ask" in message:
            self._ask(*message["ask"])
        elif not self.process:
            self._collect(message)
        elif "at" in message or "paces" in message:
            self._note(message)
        else:
            self._send(0, message)

    def _note(self, news: Mapping[str, Any]) -> None:
        """Keeps what is to be told to the parent, with other news, at the next look."""
        for kind, values in news.items():
            self._news.setdefault(kind, {}).update(values)

    def _collect(self, message: Mapping[str, Any]) -> None:
        """What the first process hears of any other."""
        for process, counts in message.get("at", {}).items():
            self._stalls.note(int(process), tuple(counts))
        for process, figures in message.get("paces", {}).items():
            self._paces[int(process)] = Figures(*figures)
        if "straggles" in message:
            self._say(*message["straggles"])
        if "doing" in message and message["doing"][0] in self._asked:
            self._name(*message["doing"])

    def _ask(self, process: int, slows: str | None = None) -> None:
        """Lets a process say what it is doing: now, or if it slows the others, when they wait for it."""
        if process != self.process:
            self._send(process, {"ask": [process, slows]})
        elif slows is None:
            self._answer({"doing": [process, stacks()]})
        else:
            self.pace.ask(lambda doing: self._answer({"straggles": [slows, doing]}))

    def _answer(self, message: Mapping[str, Any]) -> None:
        """Tells the first process something, which may be this one."""
        if self.process:
            self._send(0, message)
        else:
            self._collect(message)

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

    def _watch(self) -> None:
        """Tells the first process how far this one and those below are; the first one looks who keeps all waiting."""
        now, counts = time.monotonic(), (self._turns.num_calls, self.num_batches)
        pace = self.pace.figures() if now - self._told_pace >= _PACE_S else None
        if pace is not None:
            self._told_pace = now
        if self.process:
            if counts != self._told and not self._is_over:
                self._told = counts
                self._note({"at": {self.process: counts}})
            if pace is not None:
                self._note({"paces": {self.process: pace}})
            if self._news:
                news, self._news = self._news, {}
                self._send(0, news)
            return
        self._stalls.note(0, counts)
        if pace is not None:
            self._compare_paces(pace)
        for process, seconds in self._stalls.found(now, self._ended):
            self._asked[process] = now, seconds
            self._ask(process)
        for process, (when, _) in list(self._asked.items()):
            if now - when > _ANSWER_S:
                self._name(process, ["  (it does not answer: it is stopped, or its host has no time for it)"])
        process, seconds = self._stalls.longest_s(now)
        if seconds > _STALLED * self._deadline_s:
            self.fail(f"process {process} has kept the others waiting for {seconds:.0f} s")

    def _name(self, process: int, doing: list[str]) -> None:
        """Says in all processes who keeps them waiting, and here what it is doing."""
        _, seconds = self._asked.pop(process)
        calls, batches = self._stalls.counts[process]
        where = f"after {calls} calls of parallelised functions and {batches} batches"
        self._say(f"meshwright: process {process} has kept the others waiting for {seconds:.0f} s, {where}", doing)

    def _compare_paces(self, pace: Figures) -> None:
        """Asks those that slow all others what they do."""
        self._paces[0] = pace
        for process, added_s, step_s in self._stragglers.found(self._paces, self._ended):
            self._ask(process, sentence(process, added_s, step_s))

    def _say(self, said: str, doing: list[str]) -> None:
        """Says something of a process in all of them, and here what it is doing."""
        self._tell({"stalled": said})
        print(f"{said}; it is at", *doing, sep="\n", file=sys.stderr, flush=True)

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
