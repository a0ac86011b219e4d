"""Bodies that come, events that go, and clients that leave in between."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshwright.serving.server.refusals import Refusal
from meshwright.serving.server.settings import ServerSettings

T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed the connection; there is nobody to answer."""


async def read_object(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """The JSON object in a request's body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # also keeps pages of other sites from posting forms to this machine
        message = f"the body is {kind or 'of no type'!s:.60}; send JSON with Content-Type: application/json"
        raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
    try:
        async with asyncio.timeout(settings.body_s):
            body = await _read_body(request, settings.body_bytes)
    except TimeoutError:
        message = f"the body did not come within {settings.body_s:g} s"
        raise Refusal(HTTPStatus.REQUEST_TIMEOUT, message, headers={"Connection": "close"}) from None
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:  # JSON, its text, or a number of too many digits
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refusal(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {why:.200}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise Refusal(HTTPStatus.BAD_REQUEST, "the body is JSON, but no object; send {...}", code="invalid_json")
    return content


async def _read_body(request: Request, most_bytes: int) -> bytes:
    text = f"the body has more than {most_bytes} bytes; send less"
    too_large = Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text, headers={"Connection": "close"})
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > most_bytes:  # nobody waits for what will be refused
        raise too_large
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > most_bytes:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Does something for a client; when it leaves, the work is cancelled, and `ClientLeft` raised."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait({task, gone})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Events as they come, until there are no more or the client leaves; `at_end` is called either way."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], at_end: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._at_end = events, at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""

        async def write() -> None:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with suppress(ClientLeft):
                await while_connected(receive, write())
        finally:
            self._at_end()
