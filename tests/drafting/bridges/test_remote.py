"""A drafter in another thread, asked over HTTP, and services that are slow, gone or broken."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

import dllm
from dllm.drafting.base import Budget, Draft, Drafter, Drafting, DraftRequest
from dllm.drafting.bridges.remote import checked
from dllm.drafting.bridges.service import Service, with_window
from dllm.drafting.naming import make_drafter
from dllm.drafting.vocabulary import fingerprint
from dllm.serve.drafts import DraftServer
from dllm.serve.run import Server, listen
from dllm.serve.settings import Settings

from ..conftest import Scripted, prompts

NEW = 16


class Slow(Drafter):
    """Waits, or fails, before it drafts."""

    def __init__(self, inner: Any, seconds: float = 0.0) -> None:
        self.inner, self.seconds = inner, seconds

    def open(self, request: DraftRequest) -> Drafting:
        drafting, part = self.inner.open(request), self

        class One(Drafting):
            def propose(self, prefix: np.ndarray, budget: Budget) -> Draft:
                time.sleep(part.seconds)
                result: Draft = drafting.propose(prefix, budget)
                return result

        return One()


@pytest.fixture
def served() -> Iterator[Any]:
    running = []

    def start(drafter: Any, vocabulary: str = "") -> tuple[str, Any]:
        service = drafter if isinstance(drafter, Service) else Service(drafter, vocabulary)
        server = Server(DraftServer(service, Settings(page=False)))
        sock = listen("127.0.0.1", 0, 5.0)
        thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
        thread.start()
        running.append((server, thread))
        until = time.monotonic() + 20
        while not server.started and time.monotonic() < until:
            time.sleep(0.01)
        return f"http://127.0.0.1:{sock.getsockname()[1]}", server

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_remote_drafter_drafts(
    verifier: dllm.DiffusionModel, served: Any, temperature: float
) -> None:
    (prompt,) = prompts(1)
    how: dict[str, Any] = {"max_new_tokens": NEW, "temperature": temperature, "seed": 2}
    plain = dllm.speculate(verifier, None, prompt, **how)
    print_ = fingerprint(verifier.tokenizer, verifier.facts.vocab_size)
    url, _ = served(Scripted([*prompt, *plain.tokens], k=3), print_)
    result = dllm.speculate(
        verifier, f"remote(url={url!r}, deadline=20)", prompt, controller="fixed(k=3)", **how
    )
    assert result.tokens == plain.tokens
    assert result.nfe == NEW // 4
    assert {r.source for r in result.rounds} == {"remote"}


def test_a_drafter_that_is_gone_or_late_costs_nothing_but_time(
    verifier: dllm.DiffusionModel, served: Any
) -> None:
    (prompt,) = prompts(1)
    plain = dllm.speculate(verifier, None, prompt, max_new_tokens=NEW)
    url, _ = served(Slow(make_drafter("prompt_lookup"), 0.5))
    for address in (url, "http://127.0.0.1:9"):
        spec = f"remote(url={address!r}, deadline=0.05, patience=2, rest=60)"
        result = dllm.speculate(verifier, spec, prompt, controller="fixed(k=3)", max_new_tokens=NEW)
        assert result.tokens == plain.tokens
        assert result.drafted == 0


def test_another_vocabulary_is_refused(verifier: dllm.DiffusionModel, served: Any) -> None:
    url, _ = served(make_drafter("prompt_lookup"), "of another model")
    with pytest.raises(dllm.ConfigError, match="vocabular"):
        dllm.speculate(
            verifier, f"remote(url={url!r}, deadline=20)", [5, 6, 7], controller="fixed(k=3)",
            max_new_tokens=4,
        )  # fmt: skip


def asked(url: str, **how: Any) -> Drafting:
    """A client at work on the text [1, 2, 3]."""
    options = ", ".join(f"{name}={value}" for name, value in how.items())
    part: Any = make_drafter(f"remote(url={url!r}, {options})")
    result: Drafting = part.open(DraftRequest(np.array([1, 2, 3]), 50, (), 40))
    return result


Reply = Callable[[str, dict[str, Any]], tuple[int, str]]


@pytest.fixture
def fake() -> Iterator[Callable[..., str]]:
    """Starts a server with scripted replies, some of them written byte by byte."""
    servers = []

    def start(reply: Reply, drip: float = 0.0) -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                message = json.loads(self.rfile.read(size))
                try:
                    status, body = reply(self.path, message)
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    for byte in body.encode() if drip else ():
                        self.wfile.write(bytes([byte]))
                        time.sleep(drip)
                    if not drip:
                        self.wfile.write(body.encode())
                except OSError:
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def good(path: str, message: dict[str, Any]) -> tuple[int, str]:
    return 200, json.dumps({"base_len": message.get("base_len"), "tokens": [5, 6]})


BAD = {
    "tokens missing": {},
    "tokens of two dimensions": {"tokens": [[5, 6]]},
    "one token, no list": {"tokens": 5},
    "a huge token": {"tokens": [10**30]},
    "a fraction": {"tokens": [1.5]},
    "a truth value": {"tokens": [True]},
    "a negative token": {"tokens": [-1]},
    "a token beyond the vocabulary": {"tokens": [50]},
    "another text": {"tokens": [5], "base_len": 2},
    "a parent before the root": {"tokens": [5], "parents": [-5]},
    "a parent behind its child": {"tokens": [5, 6], "parents": [1, -1]},
    "a parent too few": {"tokens": [5, 6], "parents": [-1]},
    "parents that are no list": {"tokens": [5], "parents": -1},
    "a tree that is too deep": {"tokens": [5] * 9, "parents": list(range(-1, 8))},
    "too many nodes": {"tokens": [5] * 999, "parents": [-1] * 999},
}


@pytest.mark.parametrize("reply", BAD.values(), ids=BAD.keys())
def test_stale_and_malformed_replies_are_no_drafts(reply: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        checked({"base_len": 3} | reply, 3, Budget(4, 4), 50)


def test_drafts_that_fit_are_taken() -> None:
    chain = checked({"base_len": 3, "tokens": [1, 2, 3], "end": 2}, 3, Budget(2, 9), 50)
    assert (chain.tokens.tolist(), chain.end) == ([1, 2], 2)
    tree = checked({"base_len": 3, "tokens": [1, 2], "parents": [-1, -1]}, 3, Budget(2, 9), 50)
    assert tree.children(-1) == [0, 1]
    assert len(checked({"base_len": 3, "tokens": []}, 3, Budget(2, 9), 50)) == 0


@pytest.mark.parametrize(
    ("status", "body"),
    [(503, '{"error": "busy"}'), (409, '{"error": "conflict"}'), (404, '"not found"'),
     (500, "<html>"), (200, "[1]"), (200, "[" * 100_000), (200, '{"tokens": ')],
)  # fmt: skip
def test_answers_that_make_no_sense_are_no_drafts(
    fake: Callable[..., str], status: int, body: str
) -> None:
    for failing in ("/v1/draft/open", "/v1/draft/draft"):
        url = fake(lambda path, m, bad=failing: (status, body) if path == bad else good(path, m))
        drafting = asked(url, deadline=20)
        assert len(drafting.propose(np.array([1, 2, 3]), Budget(4, 4))) == 0
        drafting.close()


def test_one_deadline_holds_for_opening_and_drafting(fake: Callable[..., str]) -> None:
    """However few bytes at a time the service answers."""
    drafting = asked(fake(good, drip=0.1), deadline=0.3)
    began = time.monotonic()
    assert len(drafting.propose(np.array([1, 2, 3]), Budget(4, 4))) == 0
    drafting.close()
    assert time.monotonic() - began < 1.5  # the two replies take 8 seconds


def test_a_service_that_dies_in_the_middle_of_a_text(
    verifier: dllm.DiffusionModel, fake: Callable[..., str]
) -> None:
    (prompt,) = prompts(1)
    plain = dllm.speculate(verifier, None, prompt, max_new_tokens=NEW)
    service = Service(Scripted([*prompt, *plain.tokens], k=3))

    def mortal(path: str, message: dict[str, Any]) -> tuple[int, str]:
        if message.get("base_len", 0) > len(prompt) + 4:
            raise ConnectionAbortedError  # no reply, this time and ever after
        return 200, json.dumps(service.handle(path.rpartition("/")[2], message))

    result = dllm.speculate(
        verifier, f"remote(url={fake(mortal)!r}, deadline=20, patience=1)", prompt,
        controller="fixed(k=3)", max_new_tokens=NEW,
    )  # fmt: skip
    assert result.tokens == plain.tokens
    assert [r.source for r in result.rounds[:3]] == ["remote", "remote", ""]
    assert result.drafted == 6


def opening(sid: str) -> dict[str, Any]:
    return {
        "sid": sid, "vocabulary": "", "prompt": [1, 2, 3], "vocab_size": 50, "stop_ids": [],
        "limit": 40, "temperature": 0.0, "noise_key": [0, 0], "draft_key": [0, 3],
    }  # fmt: skip


def test_a_late_draft_keeps_nobody_waiting() -> None:
    """Others are told so by their own deadline, and the session that was late is closed."""
    service = Service(Slow(make_drafter("prompt_lookup"), 0.6))
    for sid in "ab":
        service.handle("open", opening(sid))
    message = {"base_len": 3, "commit": [], "k": 4, "deadline_ms": 300}
    late: list[BaseException] = []

    def slow() -> None:
        try:
            service.handle("draft", {"sid": "a", **message})
        except TimeoutError as error:
            late.append(error)

    thread = threading.Thread(target=slow)
    thread.start()
    time.sleep(0.05)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="busy"):
        service.handle("draft", {"sid": "b", **message, "deadline_ms": 50})
    assert time.monotonic() - began < 0.4
    thread.join()
    assert len(late) == 1
    assert list(service.sessions) == ["b"]
    with pytest.raises(dllm.ConfigError, match="tokens are known"):
        service.handle("draft", {"sid": "b", **message, "base_len": 9})
    assert not service.sessions


def test_the_service_learns_the_whole_text(verifier: dllm.DiffusionModel, served: Any) -> None:
    (prompt,) = prompts(1)
    part: Any = make_drafter("suffix")
    service = Service(part)
    url, _ = served(service)
    result = dllm.speculate(
        verifier, f"remote(url={url!r}, deadline=20)", prompt, controller="fixed(k=3)",
        max_new_tokens=NEW,
    )  # fmt: skip
    until = time.monotonic() + 20
    while service.sessions and time.monotonic() < until:  # nobody waits for the answer to close
        time.sleep(0.01)
    assert list(part.texts) == [result.tokens]


def test_a_service_refuses_what_needs_scores() -> None:
    with pytest.raises(dllm.ConfigError, match="token_recycling"):
        Service(make_drafter("first_of(prompt_lookup+token_recycling)"))  # type: ignore[arg-type]


def test_the_client_may_choose_the_window() -> None:
    drafter: Any = make_drafter(["prompt_lookup", "nano"], window=8)
    changed: Any = with_window(drafter, 5)
    assert [getattr(one, "window", None) for one in changed.drafters] == [None, 5]
    assert drafter.drafters[1].window == 8
