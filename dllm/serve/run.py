"""Running the application with uvicorn: the socket, and signals that end it."""

import asyncio
import logging
import math
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from ..core.errors import ConfigError
from .connections import Connection, drop_unfinished
from .http import Serving

if TYPE_CHECKING:
    from .service import Service

KEEP_ALIVE = 25  # seconds that a connection may be idle: it closes before `Connection` warns of it
BACKLOG = 2048
DRAIN_LOOK = 0.05  # seconds between two looks whether all requests are answered


def listen(host: str, port: int, write_patience: float) -> socket.socket:
    """A socket that listens.  Connections whose peer takes nothing for ``write_patience`` seconds
    are closed by the kernel, where it can do that."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    result = socket.socket(family, socket.SOCK_STREAM)
    try:
        result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(AttributeError, OSError):
            patience = int(1000 * write_patience)
            result.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)
        result.bind((host, port))
        result.listen(BACKLOG)
    except OSError as error:
        result.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror or error}): choose "
                          "another --host or --port") from error  # fmt: skip
    return result


def log_to_stderr(level: str) -> None:
    """Begin to log what dllm says, from ``level`` on."""
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )  # fmt: skip
    logging.getLogger("dllm").setLevel(level.upper())


def address_of(sock: socket.socket, host: str) -> str:
    """The address at which ``sock`` listens."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{sock.getsockname()[1]}"


class Server(uvicorn.Server):
    """uvicorn, which stops when what runs is answered, or has had `Settings.drain` seconds."""

    def __init__(self, app: Any, serving: Serving, log_level: str = "warning") -> None:
        super().__init__(
            uvicorn.Config(
                app, log_level=log_level, timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=2, server_header=False, date_header=True,
                http=Connection, ws="none", access_log=log_level == "info",
            )
        )  # fmt: skip
        self.serving = serving
        self._draining: asyncio.Task[None] | None = None
        self._until = math.inf  # of `time.monotonic`: when what runs is given up

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets requests end, the second one tells their clients that they do
        not, the third one does not wait for that."""
        if not self.serving.draining:
            self.serving.draining = True
            self._until = time.monotonic() + self.serving.settings.drain
            asyncio.get_running_loop().call_soon_threadsafe(self._begin_to_drain)
        elif self._until:
            self._until = 0.0
        else:
            self.should_exit = self.force_exit = True

    def _begin_to_drain(self) -> None:
        async def drain() -> None:
            drop_unfinished(self.server_state.connections)
            while self.server_state.tasks and time.monotonic() < self._until:
                await asyncio.sleep(DRAIN_LOOK)
            # What was not answered in time is told so, and then the connections close.
            await asyncio.to_thread(self.serving.close)
            drop_unfinished(self.server_state.connections)
            self.should_exit = True

        self._draining = asyncio.ensure_future(drain())


def run(
    serving: "Service", host: str, port: int, ready: Callable[[str], None] = lambda url: None,
    log_level: str = "warning",
) -> None:  # fmt: skip
    """Serve until SIGTERM or SIGINT; ``ready`` gets the address once it is open."""
    from .app import create_app

    with listen(host, port, serving.settings.write_patience) as sock:
        ready(address_of(sock, host))
        server = Server(create_app(serving), serving, log_level)
        with suppress(KeyboardInterrupt):  # uvicorn raises the signals again that it has handled
            server.run(sockets=[sock])
