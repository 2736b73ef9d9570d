"""Asking a server: what ``dllm generate --server`` and ``dllm chat --server`` are made of.

A client needs neither torch nor the extra ``serve``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from ..core.access import KEY, json_headers
from ..core.errors import ConfigError, DllmError

PATIENCE = 600.0  # seconds of silence; a stream brings something every 15


@dataclass
class Answer:
    """An answer as far as it is there.

    ``figures``: forwards, computed positions and so on, of the server; ``usage``: tokens; both come
    with the last event.  ``trace`` only when it was asked for.
    """

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
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
    without ``key`` the one in the environment goes along, see `dllm.core.access`."""

    url: str
    key: str | None = None

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL:
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host:
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
        with self._asked("GET", "/v1/models", None) as response:
            data: list[dict[str, Any]] = json.loads(response.read())["data"]
            return data

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with self._asked("POST", path, body) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data != line and data != "[DONE]":
                    yield json.loads(data)

    @contextmanager
    def _asked(
        self, verb: str, path: str, body: Mapping[str, Any] | None
    ) -> Iterator[httpx.Response]:
        base = self.url.rstrip("/").removesuffix("/v1")
        headers = json_headers(self.key)
        try:
            with httpx.stream(
                verb, base + path, json=body, headers=headers, timeout=PATIENCE
            ) as got:
                if got.status_code != httpx.codes.OK:
                    raise DllmError(f"{self.url}: {_message(got)}")
                yield got
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DllmError(f"{self.url} does not answer: {error}") from error


def _message(response: httpx.Response) -> str:
    """What an error says."""
    content = response.read()
    unauthorized = response.status_code == httpx.codes.UNAUTHORIZED
    hint = f"; {KEY} holds the one to send" if unauthorized else ""
    try:
        return str(json.loads(content)["error"]["message"]) + hint
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}: is this a server of dllm?"


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
