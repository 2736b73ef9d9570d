"""Before the replicas of a cluster: here are the connections, there the answers are written.

A request whose replica is lost before its answer has begun is asked again.  A text depends on its
seed and not on the replica, so that nothing is answered twice differently.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.errors import DeadlineError
from .http import PUBLIC, Streaming, client_of, event, read_body, refusal, unless_gone, with_id
from .problems import Problem, problem_of, stopping
from .settings import Settings

log = logging.getLogger("dllm.serve")
TRIES = 3  # of a request whose replicas are lost: one that kills them must not kill all
AGAIN = 0.2  # seconds between two of them
LOOK = 5.0  # seconds in which some replica has to say whether it is there
TOLD = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
        "root_path", "headers", "client", "server")  # fmt: skip
WORKING = set[asyncio.Future[None]]()  # an event loop alone does not keep its tasks


async def asked(app: ASGIApp, scope: Scope, body: bytes) -> AsyncIterator[Any]:
    """In a replica: what ``app`` answers.  First (status, headers, what is there of the content),
    then content as it comes.  Whoever stops to iterate is a client that left."""
    sent, news = list[Message](), asyncio.Event()
    whole, gone = asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        if not whole.is_set():
            whole.set()
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        news.set()

    working = asyncio.ensure_future(app(scope, receive, send))
    WORKING.add(working)
    working.add_done_callback(WORKING.discard)
    working.add_done_callback(lambda _: news.set())
    try:
        while sent or not working.done():
            await news.wait()
            news.clear()
            messages = sent.copy()
            sent.clear()
            content = b"".join(message.get("body", b"") for message in messages)
            for first in messages[:1]:
                begins = first["type"] == "http.response.start"
                yield (first["status"], first["headers"], content) if begins else content
        await working
    finally:
        gone.set()


class Events:
    """Events of the stream at ``path``, in which an error is told."""

    def __init__(self, path: str) -> None:
        self.numbered = path == "/v1/responses"
        self.count = 0

    def seen(self, content: bytes) -> None:
        if self.numbered:
            self.count += content.startswith(b"event: ") + content.count(b"\nevent: ")

    def failure(self, problem: Problem) -> bytes:
        body = problem.body()
        if not self.numbered:
            return event(body)
        told = {**body["error"], **body, "type": "error", "sequence_number": self.count}
        return b"event: error\n" + event(told)


class Front:
    """The ASGI application of a process that listens.  ``replicas``: the handle of `asked`."""

    def __init__(self, settings: Settings, replicas: Any) -> None:
        self.settings, self.replicas = settings, replicas
        self.draining = False
        self.answers = set[Any]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            answer = await self._answer(request)
        except ClientDisconnect:
            return
        except Exception as error:
            answer = with_id(request, refusal(self.failed(error)))
        await answer(scope, receive, send)

    def failed(self, error: BaseException) -> Problem:
        """``error`` as an answer."""
        if isinstance(error, TaskCancelledError):  # by `close`
            return stopping()
        if isinstance(error, TimeoutError):
            return problem_of(DeadlineError("the request was not answered by its deadline"))
        if _lost(error):
            return Problem(503, "the replica that wrote this answer is lost", code="replica_lost",
                           retry_after=1)  # fmt: skip
        if not isinstance(error, Problem | asyncio.CancelledError):
            log.error("a request failed", exc_info=error)
        return problem_of(error)

    def close(self) -> None:
        """Cancel the answers that are still written."""
        for answer in list(self.answers):
            answer.cancel()

    async def _answer(self, request: Request) -> Response:
        client_of(request, self.settings.api_key)
        if self.draining:
            raise stopping()
        body = await read_body(request, self.settings.max_body)
        told = {name: request.scope[name] for name in TOLD if name in request.scope}
        events = Events(request.scope["path"])
        patience = LOOK if request.scope["path"] in PUBLIC else self.settings.deadline
        until = asyncio.get_running_loop().time() + patience
        (status, headers, content), got = await unless_gone(request, self._begun(told, body, until))
        rest = self._rest(got, events, until)
        if dict(headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            answer: Response = Streaming(self, events.failure, content, rest)
            events.seen(content)
        else:
            answer = Response(content + b"".join([part async for part in rest]), status)
        answer.raw_headers = headers
        return answer

    async def _begun(self, scope: Mapping[str, Any], body: bytes, until: float) -> tuple[Any, Any]:
        """How an answer begins, and its rest, of the first replica that lives long enough."""
        async with asyncio.timeout_at(until):
            for left in reversed(range(TRIES)):
                answer = self.replicas.remote(scope, body)
                self.answers.add(answer)
                try:
                    return await anext(answer), answer
                except BaseException as error:
                    self._forget(answer)
                    if not left or not _lost(error):
                        raise
                    log.warning("a replica is lost: its request is asked again")
                await asyncio.sleep(AGAIN)
        raise AssertionError

    async def _rest(self, answer: Any, events: Events, until: float) -> AsyncGenerator[bytes]:
        try:
            while True:
                async with asyncio.timeout_at(until):
                    if (content := await anext(answer, None)) is None:
                        return
                events.seen(content)
                yield content
        finally:
            self._forget(answer)

    def _forget(self, answer: Any) -> None:
        self.answers.discard(answer)
        answer.cancel()


def _lost(error: BaseException) -> bool:
    """Whether it is the replica that failed, and not the request."""
    kinds = (RayTaskError, TaskCancelledError)
    return isinstance(error, RayError | RayServeException) and not isinstance(error, kinds)
