"""Connections that send nothing, or a byte now and then: uvicorn itself waits for them for ever."""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger("dllm.serve")
REQUEST_PATIENCE = 30.0  # seconds in which a request must have arrived, body included
FILES = 64  # descriptors that are not connections
MOST = 1000  # connections
SAYING = 1.0  # seconds between two lines about connections that were closed


def most_connections() -> int:
    """How many this process can have: with no descriptor left it could not even refuse one."""
    try:
        import resource
    except ImportError:  # Windows counts none
        return MOST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(1, min(MOST, soft - FILES))


class Connection(H11Protocol):
    """uvicorn's connection, closed where no whole request comes in `REQUEST_PATIENCE` seconds after
    the first byte, the connection, or the answer before.  Beyond ``most`` the one that has waited
    longest for its request makes room; where all have one, the newcomer is closed."""

    patience = REQUEST_PATIENCE
    most: int | None = None
    closed, again = 0, 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle = True
        self._timer: asyncio.TimerHandle | None = None
        self._wait()
        if len(self.connections) > (self.most or most_connections()):
            others: Any = self.connections  # of this class, all of them
            oldest = min((c for c in others if c.waiting), key=lambda c: c.since)
            oldest.give_up(f"more than {self.most or most_connections()} connections")

    @property
    def waiting(self) -> bool:
        """Whether the request, or the next one, is not there yet."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.since = time.monotonic()  # when it began to wait for a request
        self._timer = self.loop.call_later(self.patience, self._late)

    def _late(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # else `read_body` answers
            self.give_up(f"no whole request in {self.patience:g} s")

    def give_up(self, why: str) -> None:
        """Close the connection at once."""
        cls = Connection  # one line a second, whatever number was closed
        cls.closed += 1
        if (now := time.monotonic()) >= cls.again:
            log.warning("closed %d connections: %s", cls.closed, why)
            cls.closed, cls.again = 0, now + SAYING
        self.connections.discard(self)  # now, and not once the event loop hears of it
        self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing is wrong: Java's client offers HTTP/2 with its first request."""

    def data_received(self, data: bytes) -> None:
        if self._idle:
            self._idle = False
            self._wait()
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._idle = True
        self._wait()
        if {b"content-length", b"transfer-encoding"} <= dict(self.headers).keys():
            self.transport.close()  # a proxy may take what follows for this request's body
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)


def drop_unfinished(connections: Iterable[Any]) -> None:
    """Close the connections whose request is not there yet: it would be refused."""
    for connection in list(connections):
        if connection.waiting:
            connection.transport.abort()
