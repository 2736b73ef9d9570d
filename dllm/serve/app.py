"""The ASGI application: routes behind a key, and what operators look at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from .. import __version__
from .http import Path, as_json, check_key, refusal
from .page import page
from .problems import CLOSED, Problem
from .settings import Settings


class Serving(Protocol):
    """What an application serves: a model that writes, or a drafter."""

    settings: Settings
    draining: bool  # whether new requests are refused

    def paths(self) -> list[Path]:
        """What it answers."""

    def state(self) -> dict[str, Any]:
        """What goes on in it; ``status`` is "ready" while it takes requests."""

    def exposition(self) -> bytes:
        """Prometheus metrics."""

    def failed(self, error: BaseException) -> Problem:
        """Count a request that ended without an answer; what its client is told."""

    def close(self) -> None:
        """Cancel what still runs, whose clients are told so, and end the threads."""


def create_app(serving: Serving) -> Starlette:
    """The application that serves ``serving``, and closes it in the end."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(serving.close)

    paths = [*serving.paths(), *Operation(serving).paths()]
    app = Starlette(
        routes=[Route(path, guarded(serving, work), methods=[verb]) for verb, path, work in paths],
        exception_handlers={HTTPException: _http_problem},
        lifespan=lifespan,
    )
    app.state.serving = serving
    return app


def guarded(
    serving: Serving, work: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """``work`` behind the API key; whatever it raises becomes an envelope."""

    async def handle(request: Request) -> Response:
        try:
            check_key(request, serving.settings.api_key)
            response = await work(request)
        except (ClientDisconnect, asyncio.CancelledError) as error:
            serving.failed(asyncio.CancelledError())
            if isinstance(error, asyncio.CancelledError):
                raise
            return Response(status_code=CLOSED)
        except Exception as error:
            response = refusal(serving.failed(error))
        request_id = request.headers.get("x-request-id")
        if request_id is not None:
            response.headers["x-request-id"] = request_id[:128]
        return response

    return handle


class Operation:
    """Health, metrics, version, and the page."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def paths(self) -> list[Path]:
        paths: list[Path] = [
            ("GET", "/health", self.health),
            ("GET", "/ready", self.health),
            ("GET", "/metrics", self.metrics),
            ("GET", "/version", self.version),
        ]
        return [*paths, ("GET", "/", self.page)] if self.serving.settings.page else paths

    async def health(self, request: Request) -> Response:
        """200 while requests are taken, 503 once the server stops or is broken."""
        state = self.serving.state()
        return as_json(state, 200 if state["status"] == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self.serving.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def version(self, request: Request) -> Response:
        return as_json({"version": __version__})

    async def page(self, request: Request) -> Response:
        return HTMLResponse(page(), headers={"Cache-Control": "no-cache"})


async def _http_problem(request: Request, error: Exception) -> Response:
    """No such path, or no such method."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.scope['path'][:80]}: {error.detail}"
    response = refusal(Problem(error.status_code, text))
    with suppress(TypeError):
        response.headers.update(error.headers or {})
    return response
