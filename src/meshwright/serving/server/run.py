"""Runs a server from its start to the end of the last request."""

import asyncio
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from meshwright.errors import ServingError
from meshwright.hf.tokenizer import Tokenizer
from meshwright.serving.server.app import application
from meshwright.serving.server.messages import Recipe
from meshwright.serving.server.process import Worker
from meshwright.serving.server.service import Service
from meshwright.serving.server.settings import LOOPBACK, ServerSettings

#: Connections that wait to be accepted; as many as a burst of clients may be.
_BACKLOG = 4096
#: How long requests may take to be told that they failed.
_LAST_WORDS_S = 5


def serve(recipe: Recipe, tokenizer: Tokenizer, settings: ServerSettings) -> None:
    """Serves a model until SIGTERM or SIGINT, and then until the open requests have ended.

    Args:
        recipe: How the worker makes the engine.
        tokenizer: The model's tokenizer.
        settings: How the server is reached.

    Raises:
        ProcessError: The model could not be loaded; the message is the worker's.
        ServingError: The address cannot be listened at.
    """
    asyncio.run(_serve(recipe, tokenizer, settings))


async def _serve(recipe: Recipe, tokenizer: Tokenizer, settings: ServerSettings) -> None:
    _allow_many_files()
    worker = Worker(recipe)
    config = uvicorn.Config(
        application(Service(settings, tokenizer, worker)),
        host=settings.host,
        port=settings.port,
        log_config=None,  # logging is the process's own
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        backlog=_BACKLOG,
        timeout_graceful_shutdown=round(settings.drain_s) + _LAST_WORDS_S,
    )
    server = _Server(config, worker, settings.drain_s)
    listening = _listen(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.leave)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    starting = asyncio.create_task(worker.start())
    try:
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _say_ready(settings, listening.getsockname()[1])
        await serving
    finally:
        server.should_exit = True
        await asyncio.wait({serving})
        await worker.close()
        starting.cancel()
        await asyncio.wait({starting})


def _listen(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        place = f"{settings.host} port {settings.port}"
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ServingError(f"cannot listen at {place} ({why}); give another --host or --port") from None


class _Server(uvicorn.Server):
    """Ends by itself: signals are ours, so that the process ends with exit code 0 after it was asked to end."""

    def __init__(self, config: uvicorn.Config, worker: Worker, drain_s: float):
        super().__init__(config)
        self._worker, self._drain_s = worker, drain_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def leave(self) -> None:
        """Takes no more connections, and ends with the open requests; asked a second time, at once."""
        if self.should_exit:
            self._close()
            return
        self.should_exit = True
        if self._worker.open:
            print(f"meshwright serve: {self._worker.open} requests are to end", file=sys.stderr, flush=True)
        asyncio.get_running_loop().call_later(self._drain_s, self._close)

    def _close(self) -> None:
        """Fails what is open: its clients are told so before the server ends."""
        self._closing = asyncio.create_task(self._worker.close())


def _say_ready(settings: ServerSettings, port: int) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"meshwright serve: {settings.name} at http://{host}:{port}", file=sys.stderr, flush=True)
    if settings.host not in LOOPBACK and not settings.api_key:
        print(
            "meshwright serve: anybody who reaches this address may use it; --api-key asks for a key", file=sys.stderr
        )


def _allow_many_files() -> None:
    """Every connection is an open file, of which shells allow 1,024 unless asked for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
