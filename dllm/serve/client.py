"""Asking a server: what ``dllm generate --server`` and ``dllm chat --server`` are made of.

Standard library only: a client needs neither torch nor the extra ``serve``.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..access import KEY, json_headers
from ..errors import ConfigError, DllmError

UNAUTHORIZED = 401
PATIENCE = 3600.0  # seconds of silence; the server sends something every 15


@dataclass
class Answer:
    """An answer as far as it is there.

    ``figures``: forwards, computed positions and so on, of the server; ``usage``: tokens; both come
    with the last event.  ``trace`` only when it was asked for.
    """

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    trace: dict[str, Any] | None = None
    frame: dict[str, Any] | None = None  # the canvas or the step of the last event, if it had one

    def footer(self) -> str:
        """One line of figures."""
        f, tokens = self.figures, self.usage.get("completion_tokens", 0)
        return (
            f"{tokens} tokens · {f.get('forwards', 0)} forwards · "
            f"{f.get('tokens_per_forward', 0):.2f} tokens per forward · "
            f"{f.get('computed', 0)} positions computed · {f.get('seconds', 0):.2f} s · "
            f"{f.get('queue_seconds', 0):.2f} s in the queue · {self.finish_reason}"
        )


@dataclass(frozen=True)
class Client:
    """A server at ``url``, e.g. ``http://127.0.0.1:8000``, with its API key if it asks for one;
    without ``key`` the one in the environment goes along, see `dllm.access`."""

    url: str
    key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"a server is like 'http://127.0.0.1:8000', not {self.url!r}")

    def answer(self, path: str, body: Mapping[str, Any]) -> Iterator[Answer]:
        """The answer as it grows: the same object after every event.

        ``path``: "/v1/chat/completions" or "/v1/completions".
        """
        options = {"include_usage": True, **body.get("stream_options", {})}
        result = Answer()
        request = {**body, "stream": True, "stream_options": options}
        for event in self._events(path, request):
            if "error" in event:
                raise DllmError(f"{self.url}: {event['error'].get('message')}")
            _add(result, event)
            yield result
        if result.finish_reason is None:
            raise DllmError(f"{self.url} ended the answer before it was complete")

    def models(self) -> Sequence[dict[str, Any]]:
        """What the server has."""
        connection, response = self._request("GET", "/v1/models", None)
        with connection:
            data: list[dict[str, Any]] = json.loads(response.read())["data"]
            return data

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        connection, response = self._request("POST", path, body)
        with connection:
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if line.startswith(b"data: ") and data != b"[DONE]":
                    yield json.loads(data)

    def _request(
        self, verb: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[_Closing, http.client.HTTPResponse]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else (
            http.client.HTTPConnection
        )  # fmt: skip
        connection = _Closing(kind(parts.hostname or "", parts.port, timeout=PATIENCE))
        base = parts.path.rstrip("/").removesuffix("/v1")
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.inner.request(verb, base + path, data, json_headers(self.key))
            response = connection.inner.getresponse()
            if response.status != 200:
                raise DllmError(f"{self.url}: {_message(response)}")
        except (OSError, http.client.HTTPException) as error:
            connection.inner.close()
            raise DllmError(f"{self.url} does not answer: {error}") from error
        except DllmError:
            connection.inner.close()
            raise
        return connection, response


@dataclass
class _Closing:
    inner: http.client.HTTPConnection

    def __enter__(self) -> http.client.HTTPConnection:
        return self.inner

    def __exit__(self, *_: object) -> None:
        self.inner.close()


def _message(response: http.client.HTTPResponse) -> str:
    """What an error says."""
    content = response.read()
    hint = f"; {KEY} holds the one to send" if response.status == UNAUTHORIZED else ""
    try:
        return str(json.loads(content)["error"]["message"]) + hint
    except (ValueError, KeyError, TypeError):
        return f"status {response.status}: is this a server of dllm?"


def _add(answer: Answer, event: Mapping[str, Any]) -> None:
    """What an event adds to the answer."""
    answer.frame = None
    extra = event.get("dllm") or {}
    if "type" in extra:
        answer.frame = extra
    elif event.get("usage"):
        answer.usage, answer.figures = event["usage"], extra
    for choice in event["choices"]:
        piece = choice["delta"].get("content") if "delta" in choice else choice.get("text")
        answer.text += piece or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        answer.trace = choice.get("trace") or answer.trace
