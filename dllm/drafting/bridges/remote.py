"""Drafting in another process: only token ids and the seed travel (after SLED, arXiv 2506.09397).

The service holds the drafter; the client is a `Drafter` like any other, with a deadline: when the
service is late or gone, the verifier goes on without a draft.  No probabilities are sent, so the
law is POINT; with the rule `keyed` the shared seed does the coupling.

Messages are JSON over HTTP: ``open`` {sid, vocabulary, prompt, vocab_size, stop_ids, limit,
temperature, noise_key, draft_key}, ``draft`` {sid, base_len, commit, k} -> {base_len, tokens,
parents, end}, ``close`` {sid}.  ``commit`` are the tokens committed since the previous call; a
reply counts only if its ``base_len`` is the verifier's present length.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import urlsplit

import numpy as np

from ...canvas import IntArray
from ...errors import ConfigError, DllmError
from ..base import DRAFTERS, EMPTY, Budget, Draft, Drafter, Drafting, Request, chain
from ..vocabulary import fingerprint

MOST_SESSIONS = 256
LARGEST_BODY = 1 << 24


class Service:
    """The server's side: sessions by id.  ``vocabulary`` is the fingerprint clients must have.

    Messages are answered one after the other, because sessions share a network.
    """

    def __init__(self, drafter: Drafter, vocabulary: str = "") -> None:
        self.drafter, self.vocabulary = drafter, vocabulary
        self.sessions: dict[str, tuple[Drafting, list[int]]] = {}
        self.lock = threading.Lock()

    def handle(self, action: str, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a message; raises `DllmError` or `KeyError` on a bad one."""
        actions = {"open": self._open, "draft": self._draft, "close": self._close}
        if action not in actions:
            raise ConfigError(f"unknown action {action!r}")
        with self.lock:
            return actions[action](message)

    def _open(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.vocabulary and message["vocabulary"] != self.vocabulary:
            raise ConfigError(
                "verifier and drafter use different vocabularies: serve a drafter that was trained "
                "on the verifier's tokenizer"
            )
        prompt = [int(i) for i in message["prompt"]]
        request = Request(
            np.asarray(prompt, np.int64), int(message["vocab_size"]),
            tuple(message["stop_ids"]), int(message["limit"]), float(message["temperature"]),
            tuple(message["noise_key"]), tuple(message["draft_key"]),
        )  # fmt: skip
        while len(self.sessions) >= MOST_SESSIONS:
            self.sessions.pop(next(iter(self.sessions)))[0].close()
        self.sessions[str(message["sid"])] = (self.drafter.open(request), prompt)
        return {"sid": message["sid"]}

    def _draft(self, message: dict[str, Any]) -> dict[str, Any]:
        drafting, tokens = self.sessions[str(message["sid"])]
        tokens += [int(i) for i in message["commit"]]
        if len(tokens) != message["base_len"]:
            raise ConfigError(f"{len(tokens)} tokens are known, not {message['base_len']}")
        k = int(message["k"])
        draft = drafting.propose(np.asarray(tokens, np.int64), Budget(k, k))
        return {
            "sid": message["sid"], "base_len": len(tokens), "tokens": draft.tokens.tolist(),
            "parents": None if draft.parents is None else draft.parents.tolist(), "end": draft.end,
        }  # fmt: skip

    def _close(self, message: dict[str, Any]) -> dict[str, Any]:
        found = self.sessions.pop(str(message["sid"]), None)
        if found is not None:
            found[0].close()
        return {"sid": message["sid"]}


def serve(service: Service, host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """A server for ``service`` that listens already; call ``serve_forever``, and ``shutdown``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm: ClassVar[bool] = True

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            status, answer = 400, {"error": "the message is too large"}
            if size <= LARGEST_BODY:
                status, answer = _answer(service, self.path, self.rfile.read(size))
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            with contextlib.suppress(ConnectionError):  # a client that waited long enough
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    return server


def _answer(service: Service, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    try:
        return 200, service.handle(path.strip("/"), json.loads(body))
    except (DllmError, KeyError, TypeError, ValueError) as error:
        return 400, {"error": f"{type(error).__name__}: {error}"}


@DRAFTERS.register("remote", paper="SLED: A Speculative LLM Decoding Framework for Efficient Edge "
                   "Serving", arxiv="2506.09397")  # fmt: skip
@dataclass
class Remote(Drafter):
    """The drafter behind ``url``, e.g. ``remote(url='http://127.0.0.1:8100')``.

    A draft that is not there after ``deadline`` seconds is done without; after ``patience``
    failures in a row the service is asked again only after ``rest`` seconds.
    """

    url: str = "http://127.0.0.1:8100"
    deadline: float = 1.0
    patience: int = 3
    rest: float = 5.0

    trees = True

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"url is like 'http://127.0.0.1:8100', not {self.url!r}")
        self.host, self.port = parts.hostname, parts.port or 80

    def open(self, request: Request) -> Drafting:
        return _Remote(self, request)


@dataclass
class _Remote(Drafting):
    part: Remote
    request: Request
    sid: str = field(default_factory=lambda: uuid.uuid4().hex)
    known: int = 0  # tokens the service has
    failures: int = 0
    again_at: float = 0.0
    connection: http.client.HTTPConnection | None = None

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        if time.monotonic() < self.again_at:
            return EMPTY
        try:
            if self.known == 0:
                self._open(prefix)
            message = {"base_len": len(prefix), "commit": prefix[self.known :].tolist(),
                       "k": budget.length}  # fmt: skip
            self.known = len(prefix)
            reply = self._ask("draft", message)
            return self._checked(reply, len(prefix), budget)
        except ConfigError:
            self._failed()
            raise
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            self._failed()
            return EMPTY

    def _checked(self, reply: dict[str, Any], length: int, budget: Budget) -> Draft:
        """A draft that fits; a stale or malformed one is none."""
        self.failures = 0
        tokens = np.asarray(reply["tokens"], np.int64)
        outside = tokens.size and not 0 <= tokens.min() <= tokens.max() < self.request.vocab_size
        if reply["base_len"] != length or outside:
            return EMPTY
        if reply.get("parents") is None:
            return chain(tokens[: budget.room], self.part.name)
        parents = np.asarray(reply["parents"], np.int64)
        if parents.shape != tokens.shape or (parents >= np.arange(len(parents))).any():
            return EMPTY
        return Draft(tokens, parents, source=self.part.name)

    def _open(self, prefix: IntArray) -> None:
        request, tokenizer = self.request, self.request.tokenizer
        print_ = "" if tokenizer is None else fingerprint(tokenizer, request.vocab_size)
        self._ask("open", {
            "vocabulary": print_, "prompt": prefix.tolist(), "vocab_size": request.vocab_size,
            "stop_ids": request.stop_ids, "limit": request.limit,
            "temperature": request.temperature, "noise_key": request.noise_key,
            "draft_key": request.draft_key,
        })  # fmt: skip
        self.known = len(prefix)

    def _ask(self, action: str, message: dict[str, Any]) -> dict[str, Any]:
        if self.connection is None:
            self.connection = http.client.HTTPConnection(
                self.part.host, self.part.port, timeout=self.part.deadline
            )
        body = json.dumps({"sid": self.sid, **message})
        self.connection.request("POST", f"/{action}", body, {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        reply: dict[str, Any] = json.loads(response.read())
        if response.status != 200:
            if action == "open":
                raise ConfigError(f"the drafter at {self.part.url} refuses: {reply.get('error')}")
            raise ValueError(reply.get("error"))
        return reply

    def _failed(self) -> None:
        """Forget the connection and the session; rest when it keeps failing."""
        if self.connection is not None:
            self.connection.close()
        self.connection, self.known, self.sid = None, 0, uuid.uuid4().hex
        self.failures += 1
        if self.failures >= self.part.patience:
            self.again_at, self.failures = time.monotonic() + self.part.rest, 0

    def close(self) -> None:
        try:
            if self.known:
                self._ask("close", {})
        except (OSError, http.client.HTTPException, ValueError):
            pass  # it is gone already
        if self.connection is not None:
            self.connection.close()
