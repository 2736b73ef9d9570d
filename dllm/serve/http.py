"""What all routes need: bodies, answers, and clients that leave."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..core.errors import CancelledError
from .body import Body
from .problems import Problem
from .replies import dumps

if TYPE_CHECKING:
    from starlette.types import Receive

T = TypeVar("T")
OPEN = ("/", "/health", "/ready", "/ping", "/version", "/metrics", "/favicon.ico")  # need no key
BODY_PATIENCE = 30.0  # seconds in which a body must have arrived


class Path(NamedTuple):
    """What is answered at ``path``; ``body`` is the model of what is sent, where there is one."""

    verb: str
    path: str
    answer: Callable[[Request], Awaitable[Response]]
    body: type[Body] | None = None


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def outcome(work: Future[T]) -> T:
    """The result of ``work`` in a pool; this library's `CancelledError` where the pool was closed
    before it began, which is not the same as a client that left."""
    try:
        return await asyncio.wrap_future(work)
    except asyncio.CancelledError:
        asking = asyncio.current_task()
        if work.cancelled() and (asking is None or not asking.cancelling()):
            raise CancelledError("the server is stopping") from None
        raise


async def disconnected(receive: Receive) -> None:
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
        value = json.loads(body, parse_constant=_no_constant)
        json.dumps(value, allow_nan=False)  # 1e999 is infinite
        return value
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


class Client(NamedTuple):
    """Who asks: the key, "" without one, and where from."""

    key: str = ""
    host: str = ""


NOBODY = Client()


def client_of(request: Request, keys: str | None) -> Client:
    """Who asks; `Problem` without one of the ``keys``.  The path is that of the request line:
    ``request.url`` is made from the Host header as well, which the client writes."""
    host = request.client.host if request.client else ""
    if keys is None or request.scope["path"] in OPEN:
        return Client("", host)
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    own = given if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    right = [hmac.compare_digest(own.encode(), key.encode()) for key in keys.split(",") if key]
    if not any(right):
        raise Problem(401, "the API key is missing or wrong", code="invalid_api_key")
    return Client(own, host)


def as_json(value: Any, status: int = 200) -> Response:
    return Response(dumps(value), status, media_type="application/json")


def refusal(problem: Problem) -> Response:
    response = as_json(problem.body(), problem.status)
    response.headers.update(problem.headers())
    return response
