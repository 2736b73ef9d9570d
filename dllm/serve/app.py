"""The ASGI application: routes, limits, and what becomes of clients that leave."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from .. import __version__
from .page import page
from .problems import Problem
from .protocol import Ask, read_chat, read_infill, read_score, read_text
from .replies import Reply, dumps, event
from .service import Service
from .stream import Stream

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")
log = logging.getLogger("dllm.serve")
BODY_PATIENCE = 30.0  # seconds in which a body must have arrived
OPEN_PATHS = ("/", "/health", "/ready", "/version", "/metrics")
CLOSED = 499  # what nginx logs for a client that left; nobody receives it


def create_app(service: Service) -> Starlette:
    """The application that serves ``service``, and closes it in the end."""
    routes = Routes(service)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(service.close)

    paths: list[tuple[str, str, Any]] = [
        ("POST", "/v1/chat/completions", routes.chat),
        ("POST", "/v1/completions", routes.completions),
        ("POST", "/v1/infill", routes.infill),
        ("POST", "/v1/score", routes.score),
        ("GET", "/v1/models", routes.models),
        ("GET", "/v1/models/{name:path}", routes.model),
        ("GET", "/health", routes.health),
        ("GET", "/ready", routes.ready),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/version", routes.version),
    ]
    if service.settings.page:
        paths.append(("GET", "/", routes.page))
    app = Starlette(
        routes=[Route(path, guarded(service, work), methods=[verb]) for verb, path, work in paths],
        exception_handlers={HTTPException: _http_problem},  # type: ignore[dict-item]
        lifespan=lifespan,
    )
    app.state.service = service
    return app


def guarded(
    service: Service, work: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """``work`` behind the API key; whatever it raises becomes an envelope."""

    async def handle(request: Request) -> Response:
        try:
            _check_key(request, service.settings.api_key)
            response = await work(request)
        except (ClientDisconnect, asyncio.CancelledError) as error:
            service.failed(asyncio.CancelledError())
            if isinstance(error, asyncio.CancelledError):
                raise
            return Response(status_code=CLOSED)
        except Exception as error:
            response = _refusal(service.failed(error))
        request_id = request.headers.get("x-request-id")
        if request_id is not None:
            response.headers["x-request-id"] = request_id[:128]
        return response

    return handle


class Routes:
    """What the paths answer."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def chat(self, request: Request) -> Response:
        return await self._write(request, read_chat)

    async def completions(self, request: Request) -> Response:
        return await self._write(request, read_text)

    async def infill(self, request: Request) -> Response:
        return await self._write(request, read_infill)

    async def _write(self, request: Request, read: Callable[[Any], Ask]) -> Response:
        arrived, service = time.monotonic(), self.service
        ask = read(await read_json(request, service.settings.max_body))
        handles = await service.start(ask)
        reply = Reply(ask, service.name, service.fingerprint(ask), service.piece)
        if ask.stream:
            stream = Stream(service, ask, reply, handles, arrived)
            return await unless_gone(request, Streaming.begun(service, stream))
        try:
            results = await unless_gone(
                request, asyncio.gather(*(_answer(handle) for handle in handles))
            )
        finally:
            for handle in handles:
                handle.cancel()
        for result in results:
            service.answered(result, arrived)
        return _json(reply.body([service.choice(ask, result) for result in results]))

    async def score(self, request: Request) -> Response:
        service = self.service
        body = await read_json(request, service.settings.max_body)
        prompt, texts, how = read_score(body)
        service.check_model(body.get("model"))
        scores = await unless_gone(request, service.score(prompt, texts, how))
        data = [
            {
                "index": index, "logprob": one.logprob, "stderr": one.stderr,
                "tokens": one.tokens, "forwards": one.nfe, "computed": one.computed,
                "greedy": one.greedy,
            }
            for index, one in enumerate(scores)
        ]  # fmt: skip
        return _json({"object": "list", "model": service.name, "data": data})

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self.service.check_model(request.path_params["name"])
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        service = self.service
        return {
            "id": service.name, "object": "model", "created": service.started, "owned_by": "dllm",
            "max_model_len": service.model.facts.context_length,
            "dllm": {
                "family": service.model.family.name,
                "sampler": service.settings.sampler,
                "caches": list(service.sessions),
                "defaults": {
                    k: v for k, v in service.model.generation_defaults.items()
                    if isinstance(v, int | float | str)
                },
            },
        }  # fmt: skip

    async def health(self, request: Request) -> Response:
        """200 while the server lives, 503 once it stops."""
        return self._state()

    async def ready(self, request: Request) -> Response:
        """200 while it takes requests, with the state of the queue."""
        return self._state()

    def _state(self) -> Response:
        service = self.service
        state = {
            "status": "broken" if service.broken else "stopping" if service.draining else "ready",
            "running": service.running, "waiting": service.waiting,
            "max_rows": service.settings.max_rows * len(service.sessions),
            "max_waiting": service.settings.max_waiting * len(service.sessions),
            "cache_positions_used_ratio": round(service.used, 4),
        }  # fmt: skip
        return _json(state, 200 if state["status"] == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def page(self, request: Request) -> Response:
        return HTMLResponse(page(), headers={"Cache-Control": "no-cache"})


class Streaming(Response):
    """Server-sent events.  Ends when the stream does, or the client is gone, or does not read."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, first: bytes, rest: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.service, self.first, self.rest = service, first, rest

    @classmethod
    async def begun(cls, service: Service, stream: Stream) -> Streaming:
        """A stream whose first chunk is there: until then an error is an HTTP status."""
        rest = aiter(stream)
        try:
            return cls(service, await anext(rest), rest)
        except BaseException:
            await rest.aclose()  # type: ignore[attr-defined]
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                self.service.failed(asyncio.CancelledError())
        finally:
            for task in (writing, gone):
                task.cancel()
            results = await asyncio.gather(writing, gone, return_exceptions=True)
            await self.rest.aclose()  # type: ignore[attr-defined]
        if isinstance(results[0], OSError | TimeoutError):  # the connection closes without an end
            log.info("a reader left or stopped reading")
        elif isinstance(results[0], Exception):
            raise results[0]

    async def _write(self, send: Send) -> None:
        start: Message = {
            "type": "http.response.start", "status": 200, "headers": self.raw_headers
        }  # fmt: skip
        await send(start)
        await self._send(send, self.first)
        try:
            async for chunk in self.rest:
                await self._send(send, chunk)
        except (OSError, TimeoutError):
            raise
        except Exception as error:
            await self._send(send, event(self.service.failed(error).body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, chunk: bytes) -> None:
        body: Message = {"type": "http.response.body", "body": chunk, "more_body": True}
        async with asyncio.timeout(self.service.settings.write_patience):
            await send(body)


async def _answer(handle: Any) -> Any:
    return await handle


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_json(request: Request, most: int) -> Any:
    """The body as JSON; `Problem` where it is too large, too slow, or something else."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem(415, "send JSON, with the header Content-Type: application/json")
    too_large = Problem(413, f"the body may have {most} bytes", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:19]) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_PATIENCE):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise Problem(408, f"the body did not arrive in {BODY_PATIENCE:g} seconds") from None
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _check_key(request: Request, key: str | None) -> None:
    if key is None or request.url.path in OPEN_PATHS:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), key.encode()):
        raise Problem(401, "the API key is missing or wrong", code="invalid_api_key")


def _json(value: Any, status: int = 200) -> Response:
    return Response(dumps(value), status, media_type="application/json")


def _refusal(problem: Problem) -> Response:
    response = _json(problem.body(), problem.status)
    response.headers.update(problem.headers())
    return response


async def _http_problem(request: Request, error: Exception) -> Response:
    """No such path, or no such method."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:80]}: {error.detail}"
    response = _refusal(Problem(error.status_code, text))
    with suppress(TypeError):
        response.headers.update(error.headers or {})
    return response
