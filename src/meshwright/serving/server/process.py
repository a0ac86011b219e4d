"""The server's side of the worker: starts it, talks to it, and starts another when it dies."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread

from meshwright.errors import ProcessError
from meshwright.profiler.database import cache_folder
from meshwright.serving.requests import EngineStopped, Overloaded, Sampling, Stats
from meshwright.serving.server.messages import (
    Cancel,
    CannotLoad,
    News,
    Ready,
    Recipe,
    Refused,
    Report,
    Submit,
    unpacked,
)

#: Before a worker that has died is replaced; doubled up to the second number while they die soon.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.5, 30.0
#: A worker that served so long did not die soon.
_SOUND_S = 60.0
_LOST = "the process of the engine has ended"
#: A worker whose engine is ready reports twice a second (`worker.STATS_S`). One that says nothing hangs, by its driver
#: or since it was stopped; it is ended after so many waits of so long. Several, not one long wait, since a whole server
#: that was stopped and goes on must give its worker time to speak.
_WAIT_S, _MOST_WAITS = 0.8, 5

Receive = Callable[[News], None]
_Said = Report | Ready | CannotLoad | None  # None is the end


class _Silence(Enum):
    SILENT = "a worker hangs"


@dataclass
class Ticket:
    """One request that a worker has."""

    number: int
    receive: Receive
    accepted: "asyncio.Future[None]" = field(repr=False)


class Worker:
    """The engine in its process, as the server's event loop sees it.

    Attributes:
        ready: What the engine said of itself; None while none is ready.
        stats: How it did last; None before.
        restarts: How many workers died after the first was started.
    """

    def __init__(self, recipe: Recipe):
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.restarts = 0
        self._recipe = recipe
        self._tickets: dict[int, Ticket] = {}
        self._numbers = count()
        self._process: subprocess.Popen[bytes] | None = None
        self._outgoing: SimpleQueue[Submit | Cancel | None] = SimpleQueue()
        self._supervision: asyncio.Task[None] | None = None
        self._first = asyncio.Event()
        self._closing = False

    @property
    def open(self) -> int:
        """How many requests the worker has."""
        return len(self._tickets)

    @property
    def pid(self) -> int | None:
        """The worker's process; None while there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts a worker, and from then on another whenever one dies; returns when the first is ready.

        Raises:
            ProcessError: The first one could not load its model; the message is its own.
        """
        self._supervision = asyncio.create_task(self._supervise())
        waiting = asyncio.create_task(self._first.wait())
        await asyncio.wait({self._supervision, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._supervision.done():
            self._supervision.result()

    async def submit(self, prompt: tuple[int, ...], sampling: Sampling, receive: Receive) -> Ticket:
        """Hands a request to the engine; what comes of it is given to `receive` on the event loop.

        Raises:
            Overloaded: The engine's queue is full.
            ServingError: The engine refused it for another reason.
            EngineStopped: There is no engine just now.
        """
        if self.ready is None:
            raise EngineStopped("the model is being loaded; try again in some seconds")
        ticket = Ticket(next(self._numbers), receive, asyncio.get_running_loop().create_future())
        self._tickets[ticket.number] = ticket
        self._outgoing.put(Submit(ticket.number, prompt, sampling))
        try:
            await ticket.accepted
        except BaseException:
            self.cancel(ticket)
            raise
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request: nothing more of it is received, and the engine frees its blocks."""
        if self._tickets.pop(ticket.number, None) is not None:
            self._outgoing.put(Cancel(ticket.number))

    async def close(self) -> None:
        """Ends the worker; requests that are open fail."""
        self._closing = True
        if self._process is not None:
            self._process.kill()  # it holds nothing that would have to be saved
        elif self._supervision is not None:
            self._supervision.cancel()  # it waits before it starts another
        if self._supervision is not None:
            await asyncio.wait({self._supervision})

    async def _supervise(self) -> None:
        loop, pause = asyncio.get_running_loop(), _LEAST_PAUSE_S
        while True:
            started = loop.time()
            problem = await self._run_one()
            is_first = not self._first.is_set()
            self.ready, self.stats, self._process = None, None, None
            self._fail_all(f"{'the server is ending' if self._closing else _LOST}; the request may be sent again")
            if self._closing:
                return
            if is_first:
                raise ProcessError(problem)
            self.restarts += 1
            print(f"meshwright serve: {problem}; starting another worker", file=sys.stderr, flush=True)
            pause = _LEAST_PAUSE_S if loop.time() - started > _SOUND_S else pause
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_S)

    async def _run_one(self) -> str:
        """Runs one worker to its end, and returns what is to be said of it."""
        ours, theirs = socket.socketpair()
        loop, said = asyncio.get_running_loop(), asyncio.Queue[_Said]()
        connection = Connection(ours.detach())
        with theirs:
            safe = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]  # looks for modules where this process does
            command = [sys.executable, *safe, "-m", "meshwright.serving.server.worker", str(theirs.fileno())]
            self._process = process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_environment()
            )
        self._outgoing = SimpleQueue()
        connection.send(self._recipe)

        def tell(message: _Said) -> None:
            loop.call_soon_threadsafe(said.put_nowait, message)

        threads = [
            Thread(target=_read, args=(connection, tell), daemon=True),
            Thread(target=_write, args=(connection, self._outgoing), daemon=True),
        ]
        for thread in threads:
            thread.start()
        problem = ""
        while (message := await self._said(said)) is not None:
            if isinstance(message, Report):
                self.stats = message.stats
                for refused in message.refused:
                    self._refuse(refused)
                for row in message.news:
                    self._receive(unpacked(row))
            elif isinstance(message, Ready):
                self.ready = message
                self._first.set()
            elif isinstance(message, CannotLoad):
                problem = message.message
            else:
                problem = f"the process of the engine has said nothing for {_WAIT_S * _MOST_WAITS:.0f} s and is ended"
                break
        self._outgoing.put(None)
        process.kill()  # where only its socket is closed
        code = await asyncio.to_thread(process.wait)
        for thread in threads:
            await asyncio.to_thread(thread.join)
        connection.close()
        return problem or f"the process of the engine ended with exit code {code}; what it said is above"

    async def _said(self, said: "asyncio.Queue[_Said]") -> _Said | _Silence:
        """What the worker says next, or that it hangs. One that loads its model may take its time."""
        waits = 0
        while waits < _MOST_WAITS:
            try:
                async with asyncio.timeout(None if self.ready is None else _WAIT_S):
                    return await said.get()
            except TimeoutError:
                waits += said.empty()
        return _Silence.SILENT

    def _refuse(self, message: Refused) -> None:
        ticket, error = self._tickets.pop(message.number, None), message.error
        if ticket is None:
            return
        if isinstance(error, Overloaded) and self.stats is not None:  # a second for each batch that waits
            error.retry_after_s = max(error.retry_after_s, self.stats.waiting / max(self.stats.slots, 1))
        ticket.accepted.set_exception(error)

    def _receive(self, news: News) -> None:
        if news.finish_reason == "error":
            self.ready = None  # the worker is about to end
        ticket = self._tickets.get(news.number)
        if ticket is None:
            return
        if not ticket.accepted.done():
            ticket.accepted.set_result(None)
        if news.finish_reason is not None:
            del self._tickets[news.number]
        if news.tokens or news.finish_reason:
            ticket.receive(news)

    def _fail_all(self, error: str) -> None:
        tickets, self._tickets = self._tickets, {}
        for ticket in tickets.values():
            if ticket.accepted.done():
                ticket.receive(News(ticket.number, finish_reason="error", error=error))
            else:
                ticket.accepted.set_exception(EngineStopped(error))


def _environment() -> dict[str, str]:
    """A worker's: unless JAX is told where, compiled programs are kept, so that the next worker is ready soon."""
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(cache_folder() / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return {**os.environ} | ({} if os.environ.get("JAX_COMPILATION_CACHE_DIR") else kept)


def _read(connection: Connection, tell: Callable[[_Said], None]) -> None:
    """Passes on what the worker says, and None at its end."""
    try:
        while True:
            tell(connection.recv())
    except (EOFError, OSError):
        tell(None)


def _write(connection: Connection, outgoing: "SimpleQueue[Submit | Cancel | None]") -> None:
    try:
        while (message := outgoing.get()) is not None:
            connection.send(message)
    except OSError:
        pass  # the reader says so
