"""What stands before replicas, which are lost when a test says so: no cluster is needed."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

import dllm
from dllm.core.errors import ConfigError

from .conftest import PATIENCE, PLAIN, Served, idle, serve, until

pytest.importorskip("ray")
with warnings.catch_warnings():  # of Ray's own settings
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import RequestCancelledError
from starlette.middleware.cors import CORSMiddleware

from dllm.serve import cluster, front
from dllm.serve.connections import Connection
from dllm.serve.front import Front, asked
from dllm.serve.http import origins
from dllm.serve.run import Server, listen

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SLOWLY = {"sampler": "fixed(n=1)", "max_tokens": 32, "block_length": 32, "ignore_eos": True}
KEY = {"Authorization": "Bearer secret"}
Lost = Callable[[], Exception]


class Answer:
    """As Ray's generator of an answer: ``lost`` after some ``parts`` of it."""

    def __init__(self, parts: AsyncIterator[Any], after: int, lost: Lost) -> None:
        self.parts, self.after, self.lost = parts, after, lost
        self.cancelled = False

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Any:
        if self.after == 0:
            await self.parts.aclose()  # type: ignore[attr-defined]
            raise self.lost()
        self.after -= 1
        working = asyncio.ensure_future(anext(self.parts))
        while not working.done():
            await asyncio.wait({working}, timeout=0.01)
            if self.cancelled:
                working.cancel()
                raise RequestCancelledError
        return working.result()

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """As a handle of Ray Serve: ``plan`` says of each request how many parts come, and what then
    fails; without one it is answered."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.plan: list[tuple[int, Lost]] = []
        self.calls = 0
        self.silent = False
        self.begun = list[Any]()  # parts before the silence

    def remote(self, scope: Any, body: bytes) -> Answer:
        self.calls += 1
        after, lost = self.plan.pop(0) if self.plan else (-1, ActorDiedError)
        parts = silence(self.begun) if self.silent else asked(self.app, scope, body)
        return Answer(parts, after, lost)


async def silence(begun: list[Any]) -> AsyncIterator[Any]:
    for part in begun:
        yield part
    await asyncio.sleep(PATIENCE)
    yield b""


@pytest.fixture
def replicas(tiny: dllm.DiffusionModel) -> Iterator[tuple[Served, Replicas, Served]]:
    """A server, its application as that of replicas, and a front before these."""
    plain = serve(tiny, caches=("none", "dual"), name="tiny", api_key="secret")
    handle = Replicas(plain.server.config.app)
    behind = Front(plain.service.settings, handle)
    sock = listen("127.0.0.1", 0, 30.0)
    server = Server(CORSMiddleware(behind, **origins(["https://a.example"])), behind)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    before = Served(url, plain.service, server, thread)
    until(lambda: server.started)
    yield before, handle, plain
    before.stop()
    until(lambda: idle(plain))
    plain.stop()


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "one two"}], "seed": 3, **SLOWLY, **more}


def bare(text: str) -> str:
    """An answer without what differs from one to the next."""
    found = json.loads(text)
    return json.dumps({k: v for k, v in found.items() if k not in ("id", "created", "dllm")})


def events(text: str) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_answers_of_replicas_are_those_of_the_server(replicas: Any) -> None:
    """Status, headers and content, of what is refused too."""
    before, handle, plain = replicas
    for path, body in [
        (CHAT, chat()), (CHAT, {}), (CHAT, chat(sampler="none")), ("/v1/nothing", {}),
        ("/v1/score", {"prompt": "one", "continuation": "two"}), ("/tokenize", {"prompt": "one"}),
    ]:  # fmt: skip
        here, there = (one.post(path, body, headers=KEY) for one in (before, plain))
        assert here.status_code == there.status_code, path
        assert bare(here.text) == bare(there.text)
        same = [{k for k in one.headers if k != "connection"} for one in (here, there)]
        assert same[0] == same[1]
    stream = chat(stream=True, stream_options={"include_usage": True})
    here, there = (events(one.post(CHAT, stream, headers=KEY).text) for one in (before, plain))
    texts = ["".join(e["choices"][0]["delta"].get("content") or "" for e in one if e["choices"])
             for one in (here, there)]  # fmt: skip
    assert texts[0] == texts[1] and here[-1]["usage"] == there[-1]["usage"]
    assert before.get("/health").json()["status"] == "ready"
    calls = handle.calls
    assert before.post(CHAT, chat()).status_code == 401  # without a key, and without a replica
    large = b" " * (plain.service.settings.max_body + 1)
    refused = before.ask("POST", CHAT, content=large, headers=KEY)
    assert refused.status_code == 413 and "x-request-id" in refused.headers
    page = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    asks = before.ask("OPTIONS", CHAT, headers=page)
    assert asks.headers["access-control-allow-origin"] == "https://a.example"
    assert handle.calls == calls


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_has_not_begun_comes_of_other_replicas(replicas: Any, stream: bool) -> None:
    before, handle, plain = replicas
    handle.plan = [(0, ActorDiedError), (0, ActorDiedError)]
    answer = before.post(CHAT, chat(stream=stream), headers=KEY)
    assert answer.status_code == 200 and handle.calls == 3
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n") and "error" not in answer.text
    else:
        assert bare(answer.text) == bare(plain.post(CHAT, chat(), headers=KEY).text)


def test_replicas_that_are_all_lost_are_an_error_of_the_api(replicas: Any) -> None:
    before, handle, _ = replicas
    handle.plan = [(0, ActorDiedError)] * 3
    answer = before.post(CHAT, chat(), headers=KEY)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    error = answer.json()["error"]
    assert error["type"] == "service_unavailable_error" and error["code"] == "replica_lost"
    handle.plan = [(0, lambda: RayTaskError("ask", "trace", ValueError("secret file")))]
    answer = before.post(CHAT, chat(), headers=KEY)
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text and handle.calls == 4  # it would fail again


def test_replicas_lost_in_mid_stream_are_told(replicas: Any) -> None:
    """As OpenAI's clients read it: an event with an error, and no end of the stream."""
    before, handle, _ = replicas
    handle.plan = [(4, ActorDiedError)]
    drafts = {"stream_options": {"include_drafts": True}}
    text = before.post(CHAT, chat(stream=True, **drafts), headers=KEY).text
    assert events(text)[-1]["error"]["code"] == "replica_lost" and "[DONE]" not in text
    assert len(events(text)) > 3
    handle.plan = [(1, ActorDiedError)]
    ask = {"input": "one", "stream": True, "sampler": "fixed(n=1)", "max_output_tokens": 64}
    text = before.post(RESPONSES, ask, headers=KEY).text
    *begun, last = events(text)
    assert last["type"] == "error" and last["error"]["code"] == last["code"] == "replica_lost"
    assert last["sequence_number"] == len(begun) > 0
    assert text.split("\n\n")[-2].startswith("event: error\n")


def test_who_leaves_frees_the_row_in_the_replicas(replicas: Any) -> None:
    before, _, plain = replicas
    for stream in (False, True):
        before.leave(CHAT, chat(stream=stream, n=8, max_tokens=64), 0.2, headers=KEY)
        until(lambda: idle(plain))
    assert not before.server.serving.answers


def test_streams_end_with_an_error_when_the_drain_of_replicas_runs_out(replicas: Any) -> None:
    before, _, _ = replicas
    begun, lines = threading.Event(), list[str]()
    body = chat(stream=True, stream_options={"include_drafts": True}, n=8, max_tokens=64)

    def ask() -> None:
        how: Any = {"json": body, "headers": KEY, "timeout": PATIENCE, **PLAIN}
        with httpx.stream("POST", before.url + CHAT, **how) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(PATIENCE)  # before, it would be a 503
    before.server.serving.draining = True
    assert before.post(CHAT, chat(), headers=KEY).json()["error"]["code"] == "stopping"
    before.server.serving.close()
    asking.join(PATIENCE)
    assert events("\n".join(lines))[-1]["error"]["code"] == "stopping"


def test_health_does_not_wait_for_replicas(replicas: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, handle, _ = replicas
    monkeypatch.setattr(front, "LOOK", 0.1)
    handle.silent = True
    answer = before.get("/health")
    assert answer.status_code == 504 and answer.json()["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
def test_a_replica_that_falls_silent_is_waited_for_until_the_deadline(
    replicas: Any, kind: str
) -> None:
    before, handle, plain = replicas
    before.server.serving.settings = plain.service.settings.but(deadline=0.3)
    handle.silent = True
    handle.begun = [(200, [(b"content-type", kind.encode())], b"data: 1\n\n")]
    answer = before.post(CHAT, chat(stream=True), headers=KEY)
    (last,) = events(answer.text)[1:] if "stream" in kind else [answer.json()]
    assert last["error"]["code"] == "deadline_exceeded" and not before.server.serving.answers


def test_what_replicas_get_of_a_machine() -> None:
    assert cluster.share(2, {"CPU": 16}, {}) == {"num_cpus": 8}
    assert cluster.share(4, {"CPU": 2, "GPU": 2}, {"device": "auto"}) == {
        "num_cpus": 0.5, "num_gpus": 0.5
    }  # fmt: skip
    assert cluster.share(2, {"CPU": 4, "GPU": 2}, {"device": "cpu"}) == {"num_cpus": 2}


def test_fronts_that_cannot_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a server that says nothing."""
    monkeypatch.setattr(cluster, "LOOK", 0.1)
    handlers = {kind: cluster.signal.getsignal(kind) for kind in (2, 15)}
    try:
        with pytest.raises(ConfigError, match="no process began to listen"):
            cluster.watch((), lambda: None)  # arguments are missing: the processes end
    finally:
        for kind, handler in handlers.items():
            cluster.signal.signal(kind, handler)


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\nA: "])
def test_silent_clients_do_not_stay(
    replicas: Any, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    """Connections that send nothing or half a header are closed, and others are answered."""
    before, handle, _ = replicas
    monkeypatch.setattr(Connection, "patience", 0.4)
    host, port = before.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE))
            for _ in range(60)
        ]
        for sock in silent:
            sock.sendall(begun)
        answer = before.post(CHAT, chat(), headers=KEY)
        assert answer.status_code == 200
        assert all(sock.recv(1000)[:1] in (b"", b"H") for sock in silent)  # closed, or told so
        until(lambda: len(before.server.server_state.connections) <= 1)
    assert handle.calls == 1
