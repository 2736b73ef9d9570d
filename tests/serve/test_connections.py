"""What connections that say nothing, or half of it, can do to others."""

import logging
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress

import pytest

import dllm
from dllm.serve.connections import MOST, REQUEST_PATIENCE, Connection, most_connections
from dllm.serve.run import KEEP_ALIVE

from .conftest import PATIENCE, Served, Start, address, posted, raw, until

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.mark.parametrize(
    "drip", [b"", b"POST /v1/comple", b"GET /health HTTP/1.1\r\nHost: x\r\nA: "]
)
def test_silent_and_dripping_connections_are_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch, drip: bytes
) -> None:
    monkeypatch.setattr(Connection, "patience", 0.4)
    with socket.create_connection(address(served), timeout=PATIENCE) as sock:
        began = time.monotonic()
        with suppress(OSError):
            sock.sendall(drip)
            for _ in range(100):
                sock.settimeout(0.1)
                try:
                    if not sock.recv(100):
                        break
                except TimeoutError:
                    if drip:
                        sock.sendall(b"x")
        assert 0.2 < time.monotonic() - began < 8


def test_an_idle_connection_closes_without_a_warning(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Connection, "patience", REQUEST_PATIENCE / 20)
    monkeypatch.setattr(Connection, "again", 0.0)
    monkeypatch.setattr(served.server.config, "timeout_keep_alive", KEEP_ALIVE / 20)
    with socket.create_connection(address(served), timeout=PATIENCE) as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        while sock.recv(1000):
            pass
    assert "connections" not in caplog.text


def test_a_body_of_two_lengths_is_the_last_of_its_connection(served: Served) -> None:
    smuggled = b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"
    line = b"GET /version HTTP/1.1\r\nHost: x\r\n"
    assert raw(served, line + smuggled + line + b"\r\n", PATIENCE).count(b"HTTP/1.1 200") == 1


def test_more_connections_than_there_may_be(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Silent ones make room for whoever has something to say; the log has a line per second."""
    monkeypatch.setattr(Connection, "most", 8)
    monkeypatch.setattr(Connection, "again", 0.0)
    began = time.monotonic()
    with ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(address(served), timeout=PATIENCE))
        assert served.post(CHAT, HELLO).status_code == 200
        assert len(served.server.server_state.connections) <= 9
    lines = [record for record in caplog.records if "connections" in record.getMessage()]
    assert 1 <= len(lines) <= 2 + (time.monotonic() - began)


def test_half_sent_bodies_do_not_hold_up_the_end(
    start: Start, tiny: dllm.DiffusionModel, caplog: pytest.LogCaptureFixture
) -> None:
    served = start(tiny, drain=20.0)
    with ExitStack() as stack:
        for _ in range(5):
            sock = stack.enter_context(socket.create_connection(address(served), timeout=PATIENCE))
            sock.sendall(posted(CHAT, {}, 1000))
        until(lambda: len(served.server.server_state.tasks) == 5)
        loop = served.server.servers[0].get_loop()
        began = time.monotonic()
        loop.call_soon_threadsafe(served.server.handle_exit, signal.SIGTERM, None)
        served.thread.join(PATIENCE)
        assert not served.thread.is_alive() and time.monotonic() - began < 15
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_system_without_limits_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as Windows, where no server once started."""
    monkeypatch.setitem(sys.modules, "resource", None)
    assert most_connections() == MOST
