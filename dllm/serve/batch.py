"""Files of requests: OpenAI's batch format, or plain prompts, answered by the continuous engine.

The results are appended as they come, a line each.  A run that was killed goes on where it stopped:
a request that has a result is not asked again.  Its digest tells it from a changed request.
"""

import asyncio
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from ..core.config import MOST
from ..core.errors import ConfigError, DllmError, PromptError, QueueFullError
from ..core.json_lines import check_same, lock, name_in_errors
from .body import is_unicode
from .http import Client, dumps
from .problems import Problem
from .reading import parsed
from .requests import GenerateRequest, read_chat, read_infill, read_text
from .responses import in_responses, read_response
from .service import Service, Started
from .settings import Settings

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
INFILL, LENGTHS = "/v1/infill", ("max_tokens", "min_tokens")
READERS: dict[str, Callable[[Any], GenerateRequest]] = {
    CHAT: read_chat, TEXT: read_text, RESPONSES: read_response, INFILL: read_infill,
}  # fmt: skip
BEGIN = b'{"custom_id":'  # of a result
SYNC = 1.0  # seconds between two waits for the disk
AGAIN = 0.05  # seconds until a request is tried again that a queue had no room for


@dataclass(frozen=True)
class Line:
    """A request of a file.  ``body`` is None where the line is no request: see ``problem``."""

    id: str
    url: str
    body: dict[str, Any] | None
    digest: str
    problem: str = ""


@dataclass(frozen=True)
class Lines:
    """The requests of ``file``, as often as they are wanted.

    A ``.jsonl`` file holds OpenAI's batch requests, or objects with ``prompt`` or ``messages`` and
    any field of a request, or strings; of any other file every line that is not blank is a prompt.
    ``defaults`` are fields of a body that does not name them.  ``chat``: whether strings are what a
    user says, or plain text to be continued.
    """

    file: Path
    defaults: Mapping[str, Any]
    chat: bool = True

    def __iter__(self) -> Iterator[Line]:
        structured = self.file.suffix in (".jsonl", ".json", ".ndjson")
        try:
            with self.file.open("rb") as stream:
                for number, content in enumerate(stream, 1):
                    if content.strip():
                        yield line_of(content, number, structured, self.defaults, self.chat)
        except OSError as error:
            raise PromptError(f"cannot read {self.file}: {error.strerror}") from error


def line_of(
    content: bytes, number: int, structured: bool, defaults: Mapping[str, Any], chat: bool = True
) -> Line:
    """A request of a file, see `Lines`."""
    name = f"line-{number}"
    try:
        text = content.decode("utf-8-sig").rstrip("\r\n")  # Windows marks the first line
        item = parsed(text) if structured else text
        digest_of("", item)  # what is nested more deeply than this could not be told either
    except (ValueError, RecursionError) as error:
        return Line(name, "", None, digest_of("", content), f"line {number} is not JSON: {error}")
    if isinstance(item, str):
        item = {"prompt": item}
    if not isinstance(item, dict):
        return Line(name, "", None, digest_of("", content), f"line {number} is no request")
    if item.get("custom_id") is not None:
        name = str(item["custom_id"])
    if not is_unicode([name, item.get("url")]):
        name = name.encode(errors="backslashreplace").decode()
        problem = f"the custom_id or url of line {number} has half a surrogate"
        return Line(name, "", None, digest_of("", content), problem)
    if "body" in item:
        url, body = str(item.get("url") or CHAT), item["body"]
    else:
        body = {key: value for key, value in item.items() if key != "custom_id"}
        url = CHAT if body.get("messages") is not None else TEXT
        if url == TEXT and chat and isinstance(body.get("prompt"), str):
            said = body.pop("prompt")
            url, body = CHAT, {**body, "messages": [{"role": "user", "content": said}]}
    if not isinstance(body, dict):
        return Line(name, url, None, digest_of(url, body), f"line {number} has no body")
    given = dict(defaults)
    if url == INFILL:  # its holes say how long they are
        given = {name: value for name, value in given.items() if name not in LENGTHS}
    if url == RESPONSES and "max_tokens" in given:
        given["max_output_tokens"] = given.pop("max_tokens")
    if body.get("max_completion_tokens") is not None:  # the same by its newer name
        given.pop("max_tokens", None)
    body = {**body, **{k: v for k, v in given.items() if body.get(k) is None}}
    return Line(name, url, body, digest_of(url, body))


def digest_of(url: str, body: Any) -> str:
    """Some characters that stand for a request."""
    shown = body if isinstance(body, bytes) else json.dumps(body, sort_keys=True).encode()
    return hashlib.sha256(url.encode() + b"\0" + shown).hexdigest()[:16]


class Results(AbstractContextManager["Results"]):
    """The file of results, which no other process writes to meanwhile.  ``settings`` stand beside
    each result: what an answer depends on besides its request."""

    def __init__(self, file: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.file, self.settings = file, dict(settings)
        self.done: dict[str, str] = {}  # id -> digest
        self.failures = 0  # of these
        self._synced = time.monotonic()
        if file.exists() and not file.is_file():
            raise ConfigError(f"{file} keeps no results: name a file with -o")
        try:
            self._stream: IO[bytes] = file.open("a+b")
        except OSError as error:
            raise ConfigError(f"cannot write the results to {file}: {error.strerror}") from error
        try:
            lock(self._stream, self.file)
            self._read()
        except BaseException:
            self._stream.close()
            raise

    def _read(self) -> None:
        """What is done already.  A line that was cut off by a kill is removed."""
        self._stream.seek(0)
        good = 0
        for content in self._stream:
            if not content.endswith(b"\n") and BEGIN.startswith(content[: len(BEGIN)]):
                break
            try:
                entry = json.loads(content)
                self.done[entry["custom_id"]] = entry["request_digest"]
                settings = {name: entry["settings"].get(name) for name in self.settings}
                self.failures += failed(entry)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(
                    f"{self.file} holds something else than results: name another file"
                ) from None
            check_same(str(self.file), settings, self.settings)
            good += len(content)
        self._stream.truncate(good)

    def is_done(self, line: Line) -> bool:
        """Whether ``line`` has its result; raises where another request has it."""
        known = self.done.get(line.id)
        if known is not None and known != line.digest:
            raise ConfigError(
                f"{self.file} holds the result of another request {line.id!r}: name another file"
            )
        return known is not None

    def add(self, line: Line, entry: Mapping[str, Any]) -> None:
        """Write a result."""
        record = {"custom_id": line.id, "request_digest": line.digest, "settings": self.settings}
        record |= entry
        with name_in_errors(self.file):
            self._stream.write(dumps(record) + b"\n")
            self._stream.flush()
        self.done[line.id] = line.digest
        if time.monotonic() - self._synced > SYNC:
            self.sync()

    def sync(self) -> None:
        """Wait for the disk."""
        os.fsync(self._stream.fileno())
        self._synced = time.monotonic()

    def __exit__(self, *_: object) -> None:
        with name_in_errors(self.file):
            self.sync()
            self._stream.close()


def open_requests(lines: Iterable[Line], results: Results) -> tuple[int, Iterator[Line]]:
    """How many requests have no result yet, and these; ``lines`` are gone through twice."""
    known: set[str] = set()
    count = 0
    for line in lines:
        if line.id in known:
            raise PromptError(f"two requests are called {line.id!r}: every custom_id is its own")
        known.add(line.id)
        count += not results.is_done(line)
    return count, (line for line in lines if not results.is_done(line))


async def answer(service: Service, line: Line) -> dict[str, Any]:
    """The result of one request; errors are results too."""
    if line.body is None:
        return answer_unreadable(line)
    arrived = time.monotonic()
    try:
        read = READERS.get(line.url)
        if read is None:
            raise Problem(404, f"url {line.url[:80]!r} is not one of {', '.join(READERS)}", "url")
        ask = read(line.body)
        if ask.stream:
            raise Problem(400, "results of a batch are not streamed: drop stream", "stream")
        started = await admitted(service, ask)
        return _response(200, await service.whole(service.reply(ask), started, line.id, arrived))
    except Exception as error:
        problem = service.failed(error)
        if service.broken:  # no answer to this request, nor to those behind it
            raise DllmError(f"{problem}: the same command goes on") from error
        if line.url == RESPONSES:
            in_responses(problem)
        return _response(problem.status, problem.body())


async def admitted(service: Service, ask: GenerateRequest) -> Started:
    """A request at work, as soon as the queues have room for it: nothing is refused."""
    while True:
        try:
            return await service.start(ask, Client())
        except QueueFullError:
            await asyncio.sleep(AGAIN)


def batch_settings(settings: Settings) -> Settings:
    """These settings for a service that nobody waits at: its sessions take whatever comes."""
    return settings.but(deadline=float(10**7), max_waiting=MOST, page=False)


def _response(status: int, body: dict[str, Any]) -> dict[str, Any]:
    name = f"req_{secrets.token_hex(12)}"
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": f"batch_{name}", "response": response, "error": None}


def answer_unreadable(line: Line) -> dict[str, Any]:
    """The result of a line that is no request."""
    name = f"batch_req_{secrets.token_hex(12)}"
    error = {"code": "invalid_line", "message": line.problem}
    return {"id": name, "response": None, "error": error}


def failed(entry: Mapping[str, Any]) -> bool:
    """Whether a result is an error."""
    return entry["response"] is None or entry["response"]["status_code"] != 200


def error_of(entry: Mapping[str, Any]) -> str:
    """What a result says that is an error."""
    error = entry["error"] or entry["response"]["body"]["error"]
    return str(error["message"])


async def answer_all(
    service: Service, lines: Iterable[Line], done: Callable[[Line, dict[str, Any]], None]
) -> None:
    """Answer every line, as many at a time as keep the engine's rows busy."""
    most = 2 * service.settings.max_batch_size * len(service.sessions)
    working: dict[asyncio.Task[dict[str, Any]], Line] = {}
    source = iter(lines)
    try:
        while True:
            while len(working) < most and (line := next(source, None)) is not None:
                working[asyncio.ensure_future(answer(service, line))] = line
            if not working:
                return
            ready, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            for task in ready:
                done(working.pop(task), task.result())
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
