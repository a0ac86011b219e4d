"""Refusals in OpenAI's shape: a status, a sentence, and the field at fault."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

from meshwright.errors import ServingError
from meshwright.names import printable
from meshwright.serving.requests import EngineStopped, Overloaded

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """What a client is told instead of an answer.

    Attributes:
        status: The status of HTTP.
        param: The field at fault, None where there is none.
        code: OpenAI's short name of the fault, None where there is none.
        headers: Headers of the answer, such as `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The answer as OpenAI's clients read it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = printable(str(self))
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def refusal(error: Exception) -> Refusal:
    """The message of one of our errors for a client."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Overloaded):
        after = {"Retry-After": str(max(1, round(error.retry_after_s)))}
        return Refusal(HTTPStatus.TOO_MANY_REQUESTS, str(error), code="overloaded", headers=after)
    if isinstance(error, ServingError):
        return Refusal(HTTPStatus.BAD_REQUEST, str(error))
    if isinstance(error, EngineStopped):
        return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="unavailable", headers={"Retry-After": "5"})
    raise error
