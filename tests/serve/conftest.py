"""A server on 127.0.0.1, in a thread of the test process."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import dllm
from dllm.serve.app import create_app
from dllm.serve.run import Server, listen
from dllm.serve.service import Service
from dllm.serve.settings import Settings
from tests.cli.conftest import cli as cli

from ..conftest import small

if TYPE_CHECKING:
    import openai  # takes a second

CHAT = "/v1/chat/completions"
PATIENCE = 90.0  # seconds that anything in these tests may take, on a busy machine
PLAIN: Any = {"verify": False}  # no certificates: reading them takes each client 45 ms


@dataclass
class Served:
    """A running server."""

    url: str
    service: Service
    server: Server
    thread: threading.Thread
    clients: dict[str, openai.OpenAI] = field(default_factory=dict)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.ask("POST", path, json=body, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.ask("GET", path, **more)

    def ask(self, verb: str, path: str, **more: Any) -> httpx.Response:
        """A request on a connection of its own."""
        return httpx.request(verb, self.url + path, timeout=PATIENCE, **PLAIN, **more)

    def leave(self, path: str, body: Any, seconds: float, **more: Any) -> None:
        """A client that waits no longer than ``seconds`` for its answer."""
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(self.url + path, json=body, timeout=seconds, **PLAIN, **more)

    def client(self, key: str = "none") -> openai.OpenAI:
        import openai

        if key not in self.clients:
            self.clients[key] = openai.OpenAI(
                base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE
            )
        return self.clients[key]

    def stop(self) -> None:
        for client in self.clients.values():
            client.close()
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def until(true: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Wait for something that has to come true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)


def idle(served: Served) -> bool:
    """Whether nothing is left in the engine."""
    service = served.service
    used = sum(session.positions_used for session in service.sessions.values())
    return not (service.running or service.waiting or used)


Start = Callable[..., Served]


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(model, max_batch_size=2, ...)``: a server with these `Settings`."""
    running = []

    def begin(model: dllm.DiffusionModel, **settings: Any) -> Served:
        served = serve(model, **settings)
        running.append(served)
        return served

    yield begin
    for served in running:
        served.stop()


@pytest.fixture(scope="module")
def served(tiny: dllm.DiffusionModel) -> Iterator[Served]:
    """The tiny model behind default settings, with two caches."""
    result = serve(tiny, caches=("none", "dual"), name="tiny")
    yield result
    until(lambda: idle(result))
    result.stop()


def serve(model: dllm.DiffusionModel, **settings: Any) -> Served:
    service = Service(model, Settings(**settings))
    sock = listen("127.0.0.1", 0, service.settings.write_patience)
    server = Server(create_app(service), service)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    result = Served(f"http://127.0.0.1:{sock.getsockname()[1]}", service, server, thread)
    until(lambda: server.started)
    return result


def block_model() -> dllm.DiffusionModel:
    """A random model whose blocks of 4 positions see those before."""
    return small("Qwen3ForCausalLM", "sdar", block_length=4, head_dim=8)


def address(served: Served) -> tuple[str, int]:
    """Where a server listens."""
    host, port = served.url.removeprefix("http://").split(":")
    return host, int(port)


def posted(path: str, body: Any, length: int | None = None) -> bytes:
    """A request as it is sent; ``length``: of which its head tells, where that is another one."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {length or len(data)}\r\n\r\n".encode() + data


async def together(url: str, requests: Iterable[Any], path: str = CHAT) -> list[httpx.Response]:
    """The answers to requests that are sent at once."""
    async with httpx.AsyncClient(timeout=PATIENCE * 6, **PLAIN) as client:
        posts = (client.post(url + path, json=request) for request in requests)
        return await asyncio.gather(*posts)


def sse(text: str) -> list[Any]:
    """Data of server-sent events, without the final mark."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def deltas(answer: httpx.Response) -> list[dict[str, Any]]:
    """What the chunks of a streamed chat add to the message of its one choice."""
    return [chunk["choices"][0]["delta"] for chunk in sse(answer.text) if chunk["choices"]]


@contextmanager
def held(
    patch: pytest.MonkeyPatch, place: Any, name: str, when: Callable[..., bool],
    work: Callable[[], Any],
) -> Iterator[None]:  # fmt: skip
    """``work`` in a thread, which waits in a call of ``place.name`` as long as the block runs:
    in those calls whose arguments are ``when``."""
    real, begun, go_on = getattr(place, name), threading.Event(), threading.Event()

    def slowly(*given: Any) -> Any:
        if when(*given):
            begun.set()
            assert go_on.wait(PATIENCE)
        return real(*given)

    patch.setattr(place, name, slowly)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(PATIENCE)
        yield
    finally:
        go_on.set()
        thread.join(PATIENCE)


def raw(served: Served, data: bytes, seconds: float = 5.0) -> bytes:
    """What the server answers to ``data`` on a connection of its own."""
    with socket.create_connection(address(served), timeout=seconds) as sock:
        answer = b""
        with suppress(OSError):
            sock.sendall(data)
            while part := sock.recv(65536):
                answer += part
        return answer
