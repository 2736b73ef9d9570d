"""What all routes need: bodies, answers, and clients that leave.  No model is needed for it."""

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..core.errors import CancelledError, DeadlineError
from .body import Body
from .problems import Problem
from .settings import Settings

log = logging.getLogger("dllm.serve")

T = TypeVar("T")
Failure = Callable[[Problem], bytes]
PUBLIC = ("/", "/health", "/ready", "/ping", "/version", "/metrics", "/favicon.ico")  # need no key
BODY_PATIENCE = 30.0  # seconds in which a body must have arrived
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
LOOPBACK = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
SEPARATORS = tuple((each.encode(), f"\\u{ord(each):04x}".encode()) for each in "\x85\u2028\u2029")


class Serving(Protocol):
    """Whatever answers behind connections: a model in this process, or those of a cluster."""

    draining: bool

    @property
    def settings(self) -> Settings: ...

    def failed(self, error: BaseException) -> Problem: ...

    def close(self) -> None: ...


class Path(NamedTuple):
    """What is answered at ``path``; ``body`` is the model of what is sent, where there is one."""

    verb: str
    path: str
    answer: Callable[[Request], Awaitable[Response]]
    body: type[Body] | None = None


async def unless_gone(client: Request | Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves."""
    receive = client.receive if isinstance(client, Request) else client
    asking, left = asyncio.current_task(), False
    assert asking is not None

    async def watch() -> None:
        nonlocal left
        with suppress(Exception):
            while (await receive())["type"] != "http.disconnect":
                pass
        left = True
        asking.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except BaseException:
        if left and asking.cancelling() == 1:  # by nobody else
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()
        if left:
            asking.uncancel()


async def outcome(work: Future[T], until: float | None = None) -> T:
    """The result of ``work`` in a pool; this library's `CancelledError` where the pool was closed
    before it began, which is not the same as a client that left, and `DeadlineError` from ``until``
    (of `time.monotonic`) on."""
    clock = asyncio.timeout(until and until - time.monotonic())
    try:
        async with clock:
            return await asyncio.wrap_future(work)
    except TimeoutError:
        if not clock.expired():  # it is the work's own
            raise
        raise DeadlineError("the request was not answered by its deadline") from None
    except asyncio.CancelledError:
        asking = asyncio.current_task()
        if work.cancelled() and (asking is None or not asking.cancelling()):
            raise CancelledError("the server is stopping") from None
        raise


async def read_body(request: Request, most: int) -> bytes:
    """The body; `Problem` where it is too large or too slow."""
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
    return bytes(body)


class Client(NamedTuple):
    """Who asks: the key, "" without one, and where from."""

    key: str = ""
    host: str = ""


def client_of(request: Request, keys: str | None) -> Client:
    """Who asks; `Problem` without one of the ``keys``.  The path is that of the request line:
    ``request.url`` is made from the Host header as well, which the client writes.  A header has
    bytes, which Starlette shows as characters."""
    host = request.client.host if request.client else ""
    if keys is None or request.scope["path"] in PUBLIC:
        return Client("", host)
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    own = given if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    own, known = own.strip(), map(str.strip, keys.split(","))
    right = [hmac.compare_digest(own.encode("latin-1"), key.encode()) for key in known if key]
    if not any(right):
        raise Problem(401, "the API key is missing or wrong", code="invalid_api_key")
    return Client(own, host)


def dumps(value: Any) -> bytes:
    """JSON on one line, also for clients that end lines at separators of Unicode (httpx)."""
    text = ENCODER.encode(value).encode()
    for separator, escaped in SEPARATORS:
        text = text.replace(separator, escaped)
    return text


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


def as_json(value: Any, status: int = 200) -> Response:
    return Response(dumps(value), status, media_type="application/json")


def refusal(problem: Problem) -> Response:
    response = as_json(problem.body(), problem.status)
    response.headers.update(problem.headers())
    return response


def with_id(request: Request, response: Response) -> Response:
    """``response`` with the id that the client gave to the request, or one of ours."""
    name = request.headers.get("x-request-id", "")[:128].strip()
    name = name or f"req_{secrets.token_hex(12)}"
    response.raw_headers.append((b"x-request-id", name.encode("latin-1")))
    return response


def origins(given: Sequence[str]) -> dict[str, Any]:
    """Which web pages may ask: those of this machine, and those of the origins that are ``given``,
    which Chrome asks about once more where this server is not on the internet."""
    return {
        "allow_origins": given, "allow_origin_regex": LOOPBACK, "allow_methods": ["GET", "POST"],
        "allow_headers": ["*"], "expose_headers": ["x-request-id", "retry-after"],
        "allow_private_network": True,
    }  # fmt: skip


class Streaming(Response):
    """Server-sent events.  Ends when the stream does, or the client is gone, or does not read.
    ``failure``: the event that tells an error inside the stream."""

    media_type = "text/event-stream"

    def __init__(
        self, service: Serving, failure: Failure, first: bytes, rest: AsyncIterator[bytes]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.service, self.failure, self.first, self.rest = service, failure, first, rest

    @classmethod
    async def begun(cls, service: Serving, failure: Failure, chunks: AsyncIterator[bytes]) -> Self:
        """A stream whose first chunk is there: until then an error is an HTTP status."""
        try:
            return cls(service, failure, await anext(chunks), chunks)
        except BaseException:
            await chunks.aclose()  # type: ignore[attr-defined]
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._write(send))
        except ClientDisconnect:
            self.service.failed(asyncio.CancelledError())
        except OSError:  # the connection closes without an end
            log.info("a reader left or stopped reading")
        finally:
            await self.rest.aclose()  # type: ignore[attr-defined]

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._send(send, self.first)
        async for chunk in self._told():
            await self._send(send, chunk)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _told(self) -> AsyncIterator[bytes]:
        """The rest.  Its own failures are an event, of whatever kind: those of the connection are
        an `OSError`, too, and nobody is left to be told."""
        try:
            async for chunk in self.rest:
                yield chunk
        except Exception as error:
            yield self.failure(self.service.failed(error))

    async def _send(self, send: Send, chunk: bytes) -> None:
        async with asyncio.timeout(self.service.settings.write_patience):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
