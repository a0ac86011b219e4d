"""The worker: the process that has the engine, started by the server as `python -m meshwright.serving.server.worker`.

Whatever goes wrong with a device, its driver or a compiler ends this process and not the server, which fails the open
requests and starts another one. The two talk over one socket: what a step brings goes through it as one message. When
the server dies, the socket closes and the worker ends at once, so that no device stays occupied.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Protocol

from meshwright.errors import MeshwrightError
from meshwright.serving.handle import Handle, Listener
from meshwright.serving.requests import EngineStopped, Sampling, Stats, Token
from meshwright.serving.scheduling import Limits
from meshwright.serving.server.messages import Cancel, CannotLoad, News, Ready, Recipe, Refused, Report, Submit

#: How often a worker says how it does when nothing else happens.
STATS_S = 0.5
#: The exit code of a worker whose engine has stopped.
ENGINE_STOPPED = 70


class ServedEngine(Protocol):
    """What the server asks of an engine.

    Attributes:
        limits: What requests share.
        vocab: The number of tokens that the model knows.
    """

    limits: Limits
    vocab: int

    def submit(self, prompt: Sequence[int], sampling: Sampling, listener: Listener | None = None) -> Handle:
        """Takes a request, or raises `ServingError`."""

    def stats(self) -> Stats:
        """How it does."""


class _Desk:
    """The open requests of the worker, and what there is to say of them."""

    def __init__(self, engine: ServedEngine, connection: Connection):
        self._engine, self._connection = engine, connection
        self._lock, self._filled = Lock(), Event()
        self._filled.set()  # the first report is due at once
        self._handles: dict[int, Handle] = {}
        self._refused: list[Refused] = []
        self._stopped = False
        self._tokens: dict[int, tuple[Handle, list[Token | None]]] = {}  # since the last report; None is the end

    def submit(self, asked: Submit) -> None:
        """Hands a request to the engine."""
        try:
            handle = self._engine.submit(asked.prompt, asked.sampling, partial(self._tell, asked.number))
        except MeshwrightError as error:
            with self._lock:
                self._refused.append(Refused(asked.number, error))
                self._stopped |= isinstance(error, EngineStopped)
        else:
            with self._lock:
                self._tokens.setdefault(asked.number, (handle, []))  # that it was taken is news, too
                if handle.finish_reason is None:
                    self._handles[asked.number] = handle
        self._filled.set()

    def cancel(self, number: int) -> None:
        """Cancels a request, if it is still open."""
        with self._lock:
            handle = self._handles.get(number)
        if handle is not None:
            handle.cancel()

    def report(self) -> None:
        """Says what is new, again and again."""
        while True:
            self._filled.wait(STATS_S)
            self._filled.clear()
            with self._lock:
                refused, tokens = self._refused, self._tokens
                self._refused, self._tokens = [], {}
            news = [_news(number, handle, new).packed() for number, (handle, new) in tokens.items()]
            self._connection.send(Report(tuple(refused), tuple(news), self._engine.stats()))
            if self._stopped or any(handle.finish_reason == "error" for handle, _ in tokens.values()):
                os._exit(ENGINE_STOPPED)  # the server starts another worker

    def _tell(self, number: int, handle: Handle, token: Token | None) -> None:
        """The listener of all requests, on the engine's thread."""
        with self._lock:
            new = self._tokens.setdefault(number, (handle, []))[1]
            new.append(token)
            if token is None:
                self._handles.pop(number, None)
        self._filled.set()


def _news(number: int, handle: Handle, new: Sequence[Token | None]) -> News:
    """What is said of a request: that it has ended only with its last token, though the handle may know already."""
    tokens = tuple(token for token in new if token is not None)
    if len(tokens) == len(new):
        return News(number, tokens, cached_tokens=handle.cached_tokens)
    return News(number, tokens, handle.finish_reason, handle.cached_tokens, handle.error)


def main() -> None:
    """Makes the engine and serves it to the process at the other end of the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal and a service manager signal both; the server ends this one
    connection = Connection(int(sys.argv[1]))
    recipe: Recipe = connection.recv()
    asked: SimpleQueue[Submit | Cancel] = SimpleQueue()
    Thread(target=_read, args=(connection, asked), daemon=True).start()
    try:
        engine = _make(recipe)
    except (MeshwrightError, ImportError, OSError) as error:
        connection.send(CannotLoad(str(error)))
        return
    desk = _Desk(engine, connection)
    connection.send(Ready(engine.limits.most_tokens(), engine.limits.slots + engine.limits.queue, engine.vocab))
    Thread(target=_while_connected, args=(desk.report,), daemon=True).start()
    while True:
        message = asked.get()
        if isinstance(message, Submit):
            desk.submit(message)
        else:
            desk.cancel(message.number)


def _make(recipe: Recipe) -> ServedEngine:
    module, _, name = recipe.factory.partition(":")
    engine: ServedEngine = getattr(import_module(module), name)(**recipe.options)
    return engine


def _read(connection: Connection, asked: SimpleQueue[Submit | Cancel]) -> None:
    def read() -> None:
        while True:
            asked.put(connection.recv())

    _while_connected(read)


def _while_connected(work: Callable[[], None]) -> None:
    """Runs a thread until the server is gone, and ends the process then, or when the thread fails."""
    code = 1
    try:
        work()
    except (EOFError, OSError):
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # a step that runs, or a compiler, would keep it


if __name__ == "__main__":
    _while_connected(main)
