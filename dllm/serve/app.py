"""The ASGI application: routes behind a key, and what operators look at."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any
from urllib.parse import quote

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .. import __version__
from .http import Path, as_json, client_of, origins, refusal, with_id
from .openapi import document
from .page import page
from .problems import CLOSED, Problem
from .routes import ModelRoutes
from .service import Service

ACCESS = logging.getLogger("dllm.access")
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8"><path d="M0 0h3v3H0zM5 0h3v3H5z'
    'M0 5h3v3H0z"/><path d="M5 5h3v3H5z" opacity=".35"/></svg>'
)
# What other servers have and this one has not.
ELSEWHERE = {
    "/v1/responses/resp_": "answers are not kept: send the whole conversation as input",
    "/v1/embeddings": "a diffusion model that writes has no embeddings: use a model made for them",
    "/v1/rerank": "this server scores continuations, at /v1/score",
    "/v1/images": "this server writes text",
    "/v1/audio": "this server writes text",
    "/v1/files": "there are no files here: `dllm batch` works through a file of requests",
    "/v1/batches": "there are no batches here: `dllm batch` works through a file of requests",
    "/v1/verify": "devices are answered by an autoregressive model without --replicas",
    "/v1/messages": "this is OpenAI's API: use /v1/chat/completions",
    "/api/": "this is OpenAI's API and not Ollama's: use the base URL http://HOST:PORT/v1",
}


def create_app(serving: Service) -> Starlette:
    """The application that serves ``serving``, and closes it in the end."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(serving.close)

    paths = ModelRoutes(serving).paths()
    if serving.verifying is not None:
        paths += serving.verifying.paths()
    paths = [*paths, *Operation(serving, paths).paths()]
    app = Starlette(
        routes=[Route(one.path, Guarded(serving, one.answer), methods=[one.verb]) for one in paths],
        exception_handlers={HTTPException: _http_problem},
        middleware=[Middleware(CORSMiddleware, **origins(serving.settings.cors))],
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.serving = serving
    return app


class Guarded:
    """``work`` behind the API key; whatever it raises becomes an envelope."""

    def __init__(self, serving: Service, work: Callable[[Request], Awaitable[Response]]) -> None:
        self.serving, self.work = serving, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, serving = Request(scope, receive), self.serving
        try:
            request.state.client = client_of(request, serving.settings.api_key)
            response = await self.work(request)
        except (ClientDisconnect, asyncio.CancelledError) as error:
            serving.failed(asyncio.CancelledError())
            if isinstance(error, asyncio.CancelledError):
                raise
            response = Response(status_code=CLOSED)
        except Exception as error:
            problem = serving.failed(error)
            response = refusal(problem)
            path = quote(scope["path"])[:80]  # on one line, whatever a client writes
            line = " ".join(problem.message.split())[:200]
            said = line.partition(", not ")[0]  # what was sent may be private
            ACCESS.info("%s %s %d: %s", request.method, path, problem.status, said)
        await with_id(request, response)(scope, receive, send)


class Operation:
    """Health, metrics, version, the documentation, and the page."""

    def __init__(self, serving: Service, others: list[Path]) -> None:
        self.serving, self.others = serving, others

    @cached_property
    def document(self) -> dict[str, Any]:
        """What is answered, made when it is first asked for."""
        keyed = self.serving.settings.api_key is not None
        return document([*self.others, *self.paths()], self.serving.name, keyed)

    def paths(self) -> list[Path]:
        paths = [
            *(Path("GET", path, self.health) for path in ("/health", "/ready", "/ping")),
            Path("GET", "/metrics", self.metrics),
            Path("GET", "/version", self.version),
            Path("GET", "/openapi.json", self.openapi),
            Path("GET", "/favicon.ico", self.icon),
        ]
        return [*paths, Path("GET", "/", self.page)] if self.serving.settings.page else paths

    async def health(self, request: Request) -> Response:
        """200 while requests are taken, 503 once the server stops or is broken."""
        state = self.serving.state()
        return as_json(state, 200 if state["status"] == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics."""
        return Response(self.serving.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self, request: Request) -> Response:
        """This document."""
        return as_json(self.document)

    async def icon(self, request: Request) -> Response:
        return Response(
            ICON, media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"}
        )

    async def version(self, request: Request) -> Response:
        """The version of the library."""
        return as_json({"version": __version__})

    async def page(self, request: Request) -> Response:
        """The page: write a prompt, watch the canvas."""
        return HTMLResponse(page(), headers={"Cache-Control": "no-cache"})


async def _http_problem(request: Request, error: Exception) -> Response:
    """No such path, or no such method."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    about = next((text for start, text in ELSEWHERE.items() if path.startswith(start)), None)
    known, plain = {route.path for route in request.app.routes}, f"/{path.strip('/')}"
    right = next((p for p in (plain, f"/v1{plain}", plain[3:]) if p in known), None)
    if error.status_code == 404 and about is None and right is not None:
        about = f"it is at {right}: the base URL of clients is http://HOST:PORT/v1"
    text = f"{request.method} {path[:80]}: {about or error.detail}"
    response = refusal(Problem(error.status_code, text))
    response.headers.update(error.headers or {})
    return with_id(request, response)
