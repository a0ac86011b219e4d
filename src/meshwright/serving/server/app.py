"""The application: the addresses, who may use them, and what is said of everything that goes wrong."""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from http import HTTPStatus
from importlib import resources

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import meshwright
from meshwright.errors import MeshwrightError
from meshwright.serving.server.refusals import Refusal, refusal
from meshwright.serving.server.service import Service
from meshwright.serving.server.transport import ClientLeft

log = logging.getLogger("meshwright")
#: What is noted of a client that has left, and sees it no more; Nginx's number, since HTTP has none.
_CLIENT_LEFT = 499
_POLICY = (  # the page is one file, and asks this server only
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
Answer = Callable[[Request], Awaitable[Response]]


def application(service: Service) -> Starlette:
    """The application for a server of ASGI."""
    addresses = _Addresses(service)

    def route(path: str, answer: Answer, method: str = "GET", needs_key: bool = True) -> Route:
        return Route(path, _answered(service, answer, needs_key), methods=[method])

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        ticking = asyncio.create_task(_tick(service))
        yield
        ticking.cancel()

    return Starlette(
        routes=[
            route("/v1/completions", service.completions, "POST"),
            route("/v1/chat/completions", service.chat, "POST"),
            route("/v1/models", addresses.models),
            route("/v1/models/{name:path}", addresses.model),
            route("/metrics", addresses.metrics),
            route("/status", addresses.status),
            route("/health", addresses.health, needs_key=False),  # for balancers, which have none
            route("/", addresses.page, needs_key=False),  # its figures need it
        ],
        exception_handlers={HTTPException: _http_refusal},
        lifespan=lifespan,
    )


class _Addresses:
    """What is said of the server itself."""

    def __init__(self, service: Service):
        self._service, self._created = service, int(time.time())
        self._page = status_page()

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._service.settings.name:
            message = f"there is no model {name!r:.80}; this server has {self._service.settings.name!r}"
            raise Refusal(HTTPStatus.NOT_FOUND, message, "model", "model_not_found")
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        is_ready = self._service.worker.ready is not None
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"status": "ready" if is_ready else "loading"}, status)

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, request: Request) -> Response:
        worker, stats = self._service.worker, self._service.worker.stats
        figures = None if stats is None else asdict(stats)
        about = {
            "model": self._service.settings.name,
            "version": meshwright.__version__,
            "ready": worker.ready is not None,
            "restarts": worker.restarts,
            "max_len": worker.ready.max_len if worker.ready else None,
        }
        return JSONResponse(about | {"engine": figures} | self._service.metrics.recent())

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers={"Content-Security-Policy": _POLICY})

    def _model(self) -> dict[str, object]:
        ready = self._service.worker.ready
        return {
            "id": self._service.settings.name,
            "object": "model",
            "created": self._created,
            "owned_by": "meshwright",
            "max_model_len": None if ready is None else ready.max_len,
        }


def status_page() -> str:
    """The status page as one file that needs no other."""
    folder = resources.files("meshwright.serving.server").joinpath("assets")
    text = {
        name: folder.joinpath(name).read_text(encoding="utf-8") for name in ("status.html", "status.css", "status.js")
    }
    return text["status.html"].replace("{{style}}", text["status.css"]).replace("{{script}}", text["status.js"])


def _answered(service: Service, answer: Answer, needs_key: bool) -> Answer:
    """An address with its lock, whose errors are answers, too."""

    async def guarded(request: Request) -> Response:
        try:
            if needs_key:
                _check_key(request, service.settings.api_key)
            return await answer(request)
        except ClientLeft:
            return Response(status_code=_CLIENT_LEFT)
        except (MeshwrightError, Refusal) as error:
            refused = refusal(error)
        except Exception:  # our mistake: the log has all of it, and the client nothing of our inside
            log.exception("the answer to %s failed", request.url.path)
            refused = Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the server has made a mistake; its log says more")
        service.metrics.refused(refused.status)
        return refused.response()

    return guarded


def _check_key(request: Request, key: str) -> None:
    """Lets through who has the key; the comparison takes as long for a key that is nearly right."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if key and not (kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())):
        message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        headers = {"WWW-Authenticate": "Bearer"}
        raise Refusal(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key", headers=headers)


async def _http_refusal(request: Request, error: Exception) -> Response:
    """What there is no address for, and methods that an address does not take."""
    assert isinstance(error, HTTPException)
    path, allowed = request.url.path, dict(error.headers or {}).get("Allow")
    message = f"{path:.80} takes {allowed}, not {request.method}" if allowed else f"there is nothing at {path:.80}"
    return Refusal(error.status_code, message, headers=error.headers).response()


async def _tick(service: Service) -> None:
    while True:
        await asyncio.sleep(1.0)
        service.metrics.tick()
