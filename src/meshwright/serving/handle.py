"""One request in the hands of whoever made it: its tokens as they come, and a way to end it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from threading import Condition
from typing import Protocol

from meshwright.serving.requests import EngineStopped, Token


class Listener(Protocol):
    """Is called with each token at once, on the engine's thread, in place of a queue; it must not block.

    The server has one for all requests, so that a step of many sequences wakes one thread, once.
    """

    def __call__(self, handle: "Handle", token: Token | None) -> None:
        """One more token, or None when the request has ended."""


class Handle:
    """The tokens of one request, by `for` or by `async for`; each token comes once.

    Attributes:
        id: The engine's name of the request.
        cached_tokens: How many tokens of the prompt were found in the cache; known from the first token on.
        finish_reason: Why it ended: "stop", "length", "cancelled" or "error"; None before.
        error: What went wrong, where that is the reason.
    """

    def __init__(self, id: int, cancel: Callable[[int], None], listener: Listener | None = None):
        self.id = id
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.error = ""
        self._cancel = cancel
        self._listener = listener
        self._tokens: deque[Token] = deque()
        self._changed = Condition()
        self._wake: Callable[[], None] | None = None

    def cancel(self) -> None:
        """Ends the request after the step that runs; one that has ended stays as it is."""
        self._cancel(self.id)

    def give(self, token: Token) -> None:
        """The engine's: one more token."""
        if self._listener is not None:
            self._listener(self, token)
        else:
            with self._changed:
                self._tokens.append(token)
                self._notify()

    def end(self, reason: str, error: str = "") -> None:
        """The engine's: no more tokens."""
        with self._changed:
            self.error, self.finish_reason = error, reason
            self._notify()
        if self._listener is not None:
            self._listener(self, None)

    def __iter__(self) -> Iterator[Token]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tokens or self.finish_reason is not None)
                if not self._tokens:
                    break
                token = self._tokens.popleft()
            yield token
        self._raise_error()

    async def __aiter__(self) -> AsyncIterator[Token]:
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(event.set)

        self._wake = wake
        try:
            while True:
                event.clear()
                over = self.finish_reason is not None  # asked first: what was given before the end is there
                while self._tokens:
                    yield self._tokens.popleft()
                if over:
                    break
                await event.wait()
        finally:
            self._wake = None  # the loop may close
        self._raise_error()

    def _notify(self) -> None:
        self._changed.notify_all()
        if self._wake is not None:
            self._wake()

    def _raise_error(self) -> None:
        if self.finish_reason == "error":
            raise EngineStopped(self.error or "the engine ended while the request was open")
