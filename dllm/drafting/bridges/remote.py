"""Drafting in another process: only token ids and the seed travel (after SLED, arXiv 2506.09397).

The service holds the drafter; the client is a `Drafter` like any other, with a deadline: when the
service is late or gone, or answers nonsense, the verifier goes on without a draft.  No
probabilities are sent, so the distribution is POINT; with the rule `keyed` the shared seed does the
coupling.

Messages are JSON, posted to ``/v1/draft/open`` and so on of `dllm.serve`: ``open`` {sid,
vocabulary, prompt, vocab_size, stop_ids, limit, temperature, noise_key, draft_key, w,
deadline_ms}, ``draft`` {sid, base_len, commit, k, deadline_ms} -> {base_len, tokens, parents,
end}, ``close`` {sid, commit}. ``w`` is the number of masks a diffusion model sees, null for the
service's own; it stands in ``open`` because what is kept of a text depends on it. ``commit`` are
the tokens committed since the previous call; a reply counts only if its ``base_len`` is the
verifier's present length. ``deadline_ms`` is what is left of the client's patience: a draft that
is not ready by then is not sent, and its session is closed.
Opening a ``sid`` again replaces its session.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

from ...access import KEY, json_headers
from ...canvas import IntArray
from ...errors import ConfigError
from ..base import DRAFTERS, EMPTY, Budget, Draft, Drafter, Drafting, DraftRequest, Feedback
from ..vocabulary import fingerprint
from .service import VocabularyError

MOST_NODES = 512
LARGEST_REPLY = 1 << 24  # bytes
OTHER_VOCABULARY = "other_vocabulary"  # an error after which nobody asks again
UNAUTHORIZED = 401  # another one
PATH = "/v1/draft"

T = TypeVar("T")


class RefusedError(ConfigError):
    """The service does not know this client."""


@DRAFTERS.register("remote", paper="SLED: A Speculative LLM Decoding Framework for Efficient Edge "
                   "Serving", arxiv="2506.09397")  # fmt: skip
@dataclass
class Remote(Drafter):
    """The drafter behind ``url``, e.g. ``remote(url='http://127.0.0.1:8100')``.

    A draft that is not there after ``deadline`` seconds, opening the session included, is done
    without; after ``patience`` failures in a row the service is asked again only after ``rest``
    seconds.  ``window`` is the number of masks a diffusion model shall see, 0 for the service's
    own.  Raises `ConfigError` only when the service refuses the verifier's vocabulary, or the key
    of the environment (`dllm.access`).
    """

    url: str = "http://127.0.0.1:8100"
    deadline: float = 1.0
    patience: int = 3
    rest: float = 5.0
    window: int = 0

    timed = True

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"url is like 'http://127.0.0.1:8100', not {self.url!r}")
        if self.deadline <= 0 or self.window < 0:
            raise ConfigError("remote takes deadline > 0 and window >= 0")
        self.host, self.port = parts.hostname, parts.port or 80

    def open(self, request: DraftRequest) -> Drafting:
        return _Remote(self, request)


@dataclass
class _Remote(Drafting):
    part: Remote
    request: DraftRequest
    sid: str = field(default_factory=lambda: uuid.uuid4().hex)
    known: int = 0  # tokens the service has; 0: it has no session
    asked: bool = False  # there may be a session to close
    failures: int = 0
    again_at: float = 0.0
    connection: http.client.HTTPConnection | None = None

    def __post_init__(self) -> None:
        self.text: list[int] = self.request.prompt.tolist()
        tokenizer, size = self.request.tokenizer, self.request.vocab_size
        self.vocabulary = "" if tokenizer is None else fingerprint(tokenizer, size)

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        if time.monotonic() < self.again_at:
            return EMPTY
        self.text = prefix.tolist()
        connection = self._connection()
        until = time.monotonic() + self.part.deadline
        messages = [] if self.known else [("open", self._opening())]
        commit = self.text[self.known :] if self.known else []
        messages.append(
            ("draft", {"sid": self.sid, "base_len": len(prefix), "commit": commit,
                       "k": budget.length}),
        )  # fmt: skip
        self.asked = True
        try:
            reply = within(self.part.deadline, lambda: _converse(connection, messages, until))
            draft = checked(reply, len(prefix), budget, self.request.vocab_size, self.part.name)
        except (VocabularyError, RefusedError) as error:  # it would refuse for ever
            self._failed()
            raise type(error)(f"the drafter at {self.part.url} refuses: {error}") from None
        except Exception:  # whatever it was, decoding goes on without a draft
            self._failed()
            return EMPTY
        self.known, self.failures = len(prefix), 0
        return draft

    def _connection(self) -> http.client.HTTPConnection:
        if self.connection is None:
            self.connection = http.client.HTTPConnection(
                self.part.host, self.part.port, timeout=self.part.deadline
            )
        return self.connection

    def _opening(self) -> dict[str, Any]:
        request = self.request
        return {
            "sid": self.sid, "vocabulary": self.vocabulary, "prompt": self.text,
            "vocab_size": request.vocab_size,
            "stop_ids": request.stop_ids, "limit": request.limit,
            "temperature": request.temperature, "noise_key": request.noise_key,
            "draft_key": request.draft_key, "w": self.part.window or None,
        }  # fmt: skip

    def observe(self, feedback: Feedback) -> None:
        self.text = [*self.text, *feedback.emitted]

    def _failed(self) -> None:
        """Forget the connection; rest when it keeps failing.  The session is opened anew."""
        self._hang_up()
        self.known = 0
        self.failures += 1
        if self.failures >= self.part.patience:
            self.again_at, self.failures = time.monotonic() + self.part.rest, 0

    def _hang_up(self) -> None:
        if self.connection is not None:
            with contextlib.suppress(OSError, AttributeError):
                self.connection.sock.shutdown(socket.SHUT_RDWR)  # wakes whoever still reads
            self.connection.close()
        self.connection = None

    def close(self) -> None:
        """Tell the service, with the last tokens; nobody waits for its answer."""
        if self.asked:
            commit = self.text[self.known :] if self.known else []
            message, connection = {"sid": self.sid, "commit": commit}, self._connection()
            with contextlib.suppress(Exception):  # it is gone already
                within(self.part.deadline, lambda: _send(connection, "close", message))
        self._hang_up()


def within(seconds: float, work: Callable[[], T]) -> T:
    """What ``work()`` returns; `TimeoutError` when that takes longer.

    A socket's own time-out starts anew with every byte and does not cover looking up a name, so
    the work is done in a thread, which is abandoned when it is late.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


def _converse(
    connection: http.client.HTTPConnection, messages: list[tuple[str, dict[str, Any]]], until: float
) -> dict[str, Any]:
    """The reply to the last of ``messages``, none of which is sent after ``until``."""
    reply: Any = {}
    for action, message in messages:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        _send(connection, action, message | {"deadline_ms": math.ceil(1000 * left)})
        response = connection.getresponse()
        reply = json.loads(response.read(LARGEST_REPLY))
        if not isinstance(reply, dict):
            raise ValueError("the reply is no object")
        error = reply.get("error")
        if isinstance(error, dict) and error.get("code") == OTHER_VOCABULARY:
            raise VocabularyError(error.get("message"))
        if response.status == UNAUTHORIZED:
            raise RefusedError(f"it asks for a key, set {KEY} to the one it was started with")
        if response.status != 200:
            raise ValueError(f"status {response.status}")
    result: dict[str, Any] = reply
    return result


def _send(connection: http.client.HTTPConnection, action: str, message: dict[str, Any]) -> None:
    connection.request("POST", f"{PATH}/{action}", json.dumps(message), json_headers())


def checked(
    reply: dict[str, Any], length: int, budget: Budget, vocab_size: int, source: str = ""
) -> Draft:
    """The draft in a reply, for a text of ``length`` tokens; raises `ValueError` when it is stale
    or malformed.  Longer chains than asked for are cut."""
    tokens, parents, end = (reply.get(name) for name in ("tokens", "parents", "end"))
    if reply.get("base_len") != length:
        raise ValueError("the reply is about another text")
    if not isinstance(tokens, list) or len(tokens) > MOST_NODES:
        raise ValueError(f"tokens are a list of at most {MOST_NODES}")
    if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise ValueError("tokens lie within the verifier's vocabulary")
    end = end if type(end) is int and end >= 0 else None
    if parents is None:
        ids = np.asarray(tokens[: budget.length], np.int64)
        return Draft(ids, end=end, source=source)
    if not isinstance(parents, list) or len(parents) != len(tokens):
        raise ValueError("every node has a parent")
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if type(parent) is not int or not -1 <= parent < node:
            raise ValueError("parents stand before their children")
        depths.append(1 + depths[parent] if parent >= 0 else 1)
    if max(depths, default=0) > budget.length:
        raise ValueError("the tree is deeper than asked for")
    return Draft(np.asarray(tokens, np.int64), np.asarray(parents, np.int64), end=end,
                 source=source)  # fmt: skip
