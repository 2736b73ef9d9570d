"""What clients, models and machines do wrong.  After each fault nothing is left over: no row, no
slot, no task, no thread, no connection; and the next request works."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import torch

import dllm
from dllm.core.errors import DeadlineError
from dllm.serve.http import Streaming
from dllm.serve.replies import Reply
from dllm.serve.requests import read_chat
from dllm.serve.service import Service
from dllm.session import Session

from ..thin import some
from .conftest import (
    PATIENCE,
    PLAIN,
    Served,
    Start,
    address,
    held,
    idle,
    posted,
    raw,
    together,
    until,
)
from .leftovers import SLOWLY, at_rest, body, nothing_left, tasks

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DRAFTS: dict[str, Any] = {"stream_options": {"include_drafts": "text"}}


@pytest.fixture
def caught(served: Served, tiny: dllm.DiffusionModel) -> Iterator[Served]:
    """The server, looked at before and after the test."""
    before = at_rest(served)
    yield served
    nothing_left(served, tiny, before)


async def crowd(url: str, count: int) -> dict[str, int]:
    """A third of the clients leave, a third has a deadline that cannot be kept."""
    ends = dict.fromkeys(("left", "late", "served", "full"), 0)
    rng = random.Random(5)
    delays = [rng.uniform(0.0, 0.05) for _ in range(count)]

    async def one(client: httpx.AsyncClient, i: int) -> None:
        kind, stream = i % 3, i % 2 == 0
        request = body(f"request {i}", stream=stream)
        if kind == 1:
            request["deadline"] = 0.002
        try:
            async with asyncio.timeout(delays[i] if kind == 0 else PATIENCE * 6):
                answer = await client.post(url + CHAT, json=request)
        except TimeoutError:
            ends["left"] += 1
            return
        if answer.status_code == 429:
            ends["full"] += 1
        elif "deadline_exceeded" in answer.text:
            ends["late"] += 1
        else:
            assert answer.status_code == 200
            ends["served"] += 1

    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(timeout=PATIENCE * 6, limits=limits, **PLAIN) as client:
        await asyncio.gather(*(one(client, i) for i in range(count)))
    return ends


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_clients_that_leave_and_deadlines_that_pass(caught: Served, count: int) -> None:
    ends = asyncio.run(crowd(caught.url, count))
    assert sum(ends.values()) == count
    assert ends["left"] and ends["late"] and ends["served"]
    assert ends["late"] >= count // 6


def test_a_client_that_is_killed(caught: Served) -> None:
    """Its kernel resets the connection in the middle of a stream."""
    with socket.create_connection(address(caught), timeout=PATIENCE) as sock:
        sock.sendall(posted(CHAT, body(stream=True, **DRAFTS)))
        assert b"200 OK" in sock.recv(4096)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_reader_that_stops_reading(
    start: Start, tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row runs to the end, others are not held up, its connection is closed."""
    made = socket.socket

    def small(*arguments: Any, **more: Any) -> socket.socket:
        sock = made(*arguments, **more)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return sock

    monkeypatch.setattr("dllm.serve.run.socket.socket", small)
    served = start(tiny, write_patience=0.3)
    monkeypatch.undo()
    before = at_rest(served)
    with made(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(address(served))
        sock.sendall(posted(CHAT, body(stream=True, n=8, **DRAFTS)))
        until(lambda: served.service.running)
        assert served.post(CHAT, body(max_tokens=8, block_length=8)).status_code == 200
        until(lambda: idle(served))
        until(lambda: tasks(served) <= 3)
    nothing_left(served, tiny, before)


class SpeechlessError(Exception):
    """One that cannot say what happened."""

    def __str__(self) -> str:
        raise ValueError("of itself")


@pytest.mark.parametrize(
    "kind", some([SpeechlessError, ZeroDivisionError, ConnectionResetError], 1)
)
def test_a_model_that_raises(
    start: Start, tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """The request that makes it raise gets a 500, the others go on, whatever it raises."""
    served = start(tiny)
    before, marked = at_rest(served), [7, 7, 7]
    forward = served.service.sessions["none"]._scheduler.engine.forward
    launch = forward.launch

    def failing(jobs: list[Any]) -> Any:
        if any(job.canvas.tokens[:3].tolist() == marked for job in jobs):
            raise kind("a secret of the server")
        return launch(jobs)

    monkeypatch.setattr(forward, "launch", failing)
    requests = [{"prompt": prompt, **SLOWLY} for prompt in ([5, 6, 7], marked, [8, 9, 10])]
    answers = asyncio.run(together(served.url, requests, TEXT))
    assert [answer.status_code for answer in answers] == [200, 500, 200]
    assert "secret" not in answers[1].text and answers[1].json()["error"]["type"] == "server_error"
    assert served.post(TEXT, requests[1] | {"stream": True}).status_code == 500
    monkeypatch.undo()
    nothing_left(served, tiny, before)


def test_memory_that_runs_out(
    start: Start, tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forced: more than one row at a time does not fit; then nothing fits."""
    served = start(tiny)
    before = at_rest(served)
    forward = served.service.sessions["none"]._scheduler.engine.forward
    launch, most = forward.launch, [1]

    def tight(jobs: list[Any]) -> Any:
        if len(jobs) > most[0]:
            raise torch.OutOfMemoryError("forced")
        return launch(jobs)

    monkeypatch.setattr(forward, "launch", tight)
    answer = served.post(TEXT, {"prompt": "one two", **SLOWLY, "n": 3})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 3
    most[0] = 0
    answer = served.post(CHAT, body())
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "out_of_memory" and "retry-after" in answer.headers

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("forced")

    hook = tiny.backbone.register_forward_pre_hook(full)
    try:
        answer = served.post("/v1/score", {"prompt": "one", "continuation": "two"})
    finally:
        hook.remove()
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "out_of_memory"

    def starved(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Session, "submit", starved)  # while a request is prepared
    answer = served.post(CHAT, body())
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "out_of_memory"
    monkeypatch.undo()
    nothing_left(served, tiny, before)


def test_a_queue_that_is_full(start: Start, tiny: dllm.DiffusionModel) -> None:
    served = start(tiny, max_batch_size=1, max_waiting=2)
    before = at_rest(served)

    bodies = [body(f"r {i}", n=1 + i % 3) for i in range(6)]  # all answers or none
    answers = asyncio.run(together(served.url, bodies))
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    many = served.post(CHAT, body(n=8))
    assert many.status_code == 400 and "takes 3 at a time" in many.json()["error"]["message"]
    nothing_left(served, tiny, before)


def test_requests_that_are_not_http(caught: Served) -> None:
    assert b"400" in raw(caught, b"nonsense\r\n\r\n")
    for length, status in (("nan", 400), ("-5", 400), ("99999999999", 413)):
        head = posted(TEXT, {}).partition(b"Content-Length")[0] + b"Connection: close\r\n"
        sent = head + f"Content-Length: {length}\r\n\r\n".encode()
        assert raw(caught, sent).startswith(f"HTTP/1.1 {status}".encode())
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    for headers, word in (({}, "Content-Type"), (packed, "Content-Encoding")):
        answer = caught.ask("POST", CHAT, content=gzip.compress(b"{}"), headers=headers)
        assert answer.status_code == 415 and word in answer.json()["error"]["message"]
    assert caught.get(CHAT).status_code == 405
    assert caught.get("/none").json()["error"]["type"] == "not_found_error"


def test_a_body_that_is_too_large(start: Start, tiny: dllm.DiffusionModel) -> None:
    served = start(tiny, max_body=2000, max_prompt_tokens=20)
    before = at_rest(served)
    large = served.post(CHAT, body("x" * 3000))
    assert large.status_code == 413

    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 100

    headers = {"Content-Type": "application/json"}
    chunked = served.ask("POST", CHAT, content=parts(), headers=headers)
    assert chunked.status_code == 413
    long = served.post(TEXT, {"prompt": "a b " * 20, "max_tokens": 4})
    assert long.status_code == 400 and "takes 20" in long.json()["error"]["message"]
    assert long.json()["error"]["code"] == "context_length_exceeded"  # clients shorten it then
    nothing_left(served, tiny, before)


def test_a_deadline_passes_wherever_a_request_waits(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a structure that is built, and for likelihoods, of a prompt too."""
    slow = body(ignore_eos=False, structured_outputs={"regex": "[k-o]{1,3}"})
    late = body(ignore_eos=False, structured_outputs={"regex": "[p-t]{1,3}"}, deadline=0.2)
    with held(monkeypatch, Service, "_submitted", lambda *_: True, lambda: served.post(CHAT, slow)):
        assert served.post(CHAT, late).json()["error"]["code"] == "deadline_exceeded"
    monkeypatch.setattr(served.service.likelihoods, "deadline", 0.2)
    scored = {"prompt": "one", "continuation": ["two three four"] * 24, "samples": 4096}
    assert served.post("/v1/score", scored).status_code == 504
    monkeypatch.setattr("dllm.serve.likelihoods.token_scores", lambda *_: time.sleep(0.5))
    told = {"prompt": "one", "max_tokens": 4, "prompt_logprobs": 1, "deadline": 0.2}
    assert served.post(TEXT, told).status_code == 504
    until(lambda: idle(served))


def test_likelihoods_that_nobody_waits_for_end(served: Served) -> None:
    """The next request need not wait for the quarter of a minute that they would take."""
    long = {"prompt": "one", "continuation": ["two three four"] * 24, "samples": 4096}
    served.leave("/v1/score", long, 0.3)
    short, began = {"prompt": "one", "continuation": "two", "samples": 1}, time.perf_counter()
    assert served.post("/v1/score", short).status_code == 200
    assert time.perf_counter() - began < 10


def test_a_client_that_leaves_is_no_failure(
    caught: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while it waits, and without a stream: its row is free before the next step, it is
    counted as cancelled, and nothing is logged."""
    served = caught

    def count(reason: str) -> float:
        labels = {"model_name": served.service.name, "finished_reason": reason}
        value = served.service.metrics.registry.get_sample_value("dllm_requests_total", labels)
        return value or 0.0

    cancelled, errors = count("cancelled"), count("error")
    for stream in (False, True):
        served.leave(CHAT, body(stream=stream, n=8), 0.05)
        left = time.monotonic()
        until(lambda: idle(served))
        assert time.monotonic() - left < 5
    until(lambda: count("cancelled") >= cancelled + 2)
    until(lambda: idle(served))
    assert count("cancelled") == cancelled + 2 and count("error") == errors
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(DeadlineError("not answered within 1 s"), b"deadline_exceeded"),
     (BrokenPipeError("of a file of the model"), b"server_error")],
)  # fmt: skip
def test_an_error_in_the_middle_of_a_stream_is_told(
    served: Served, error: Exception, code: bytes
) -> None:
    """Also one of the kind that a reader who leaves or stops reading causes, whom nothing can be
    told."""
    ask = read_chat({"messages": [{"role": "user", "content": "one"}], "stream": True})
    sent: list[bytes] = []

    async def late() -> AsyncIterator[bytes]:
        yield b"second"
        raise error

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def write() -> None:
        reply = Reply(ask, "tiny", "", served.service.spelling)
        await Streaming(served.service, reply.failure, b"first", late())._write(send)

    asyncio.run(write())
    assert sent[1:3] == [b"first", b"second"] and code in sent[3]
