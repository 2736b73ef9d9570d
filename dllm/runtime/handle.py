"""What a session gives for a request: its events as they come, and its result."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, cast

from ..models import DiffusionModel
from ..request.request import Request
from .events import Event, Reader
from .result import Result


class Handle:
    """A request that was submitted: iterate for its events, or wait for its result.

    Events can be read by one reader, in a thread (``for``) or a task (``async for``).  A reader
    that lags behind by more than ``max_events`` gets several steps merged into one event; nothing
    that was committed is lost, and the engine never waits.
    """

    def __init__(
        self, model: DiffusionModel, request: Request, max_events: int,
        cancel: Callable[["Handle"], None],
    ) -> None:  # fmt: skip
        self._request, self._cancel = request, cancel
        self._reader = Reader(model, request.recipe.config)
        self._events: deque[Event] = deque()
        self._most = max_events
        self._changed = threading.Condition()
        self._wakers: list[Callable[[], None]] = []
        self._closed = False

    def __repr__(self) -> str:
        state = "done" if self.done else "waiting" if self.queue_seconds is None else "running"
        return f"<request {self.id}: {state}>"

    @property
    def id(self) -> int:
        """Number of the request in its session."""
        return self._request.index

    @property
    def done(self) -> bool:
        """Whether there is a result, or an error in its place."""
        return self._closed

    @property
    def queue_seconds(self) -> float | None:
        """Seconds from submission to admission; None before."""
        return self._request.queue_seconds

    @property
    def prompt_tokens(self) -> int:
        """Tokens that were given: of the prompt, and of a text around holes."""
        return self._request.positions - self._request.size

    @property
    def positions(self) -> int:
        """Positions that the text may have, prompt included."""
        return self._request.positions

    def cancel(self) -> None:
        """Give the request up: its row and slots are free before the next step."""
        self._cancel(self)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result.  Raises what went wrong with this request, and `TimeoutError` when
        there is neither after ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed, timeout):
                raise TimeoutError(f"request {self.id} has no result after {timeout:g} s")
        return self._outcome()

    def __iter__(self) -> Iterator[Event]:
        while True:
            with self._changed:
                self._changed.wait_for(self._readable)
            if (event := self._pop()) is None:
                return
            yield event

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            await self._wait_until(self._readable)
            if (event := self._pop()) is None:
                return
            yield event

    def _readable(self) -> bool:
        return bool(self._events) or self._closed

    def _pop(self) -> Event | None:
        """The next event; None, or the request's error, when there are no more."""
        with self._changed:
            event = self._events.popleft() if self._events else None
        if event is None:
            self._raise()
            return None
        return self._reader.read(event)

    def __await__(self) -> Generator[Any, None, Result]:
        return self._answer().__await__()

    async def _answer(self) -> Result:
        await self._wait_until(lambda: self._closed)
        return self._outcome()

    async def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait, without holding up the event loop, until ``ready``."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if ready():  # who waits for the result sleeps through the steps
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(woken.set)

        with self._changed:
            self._wakers.append(wake)
        try:
            while not ready():
                await woken.wait()
                woken.clear()
        finally:
            with self._changed:
                self._wakers.remove(wake)

    def _put(self, event: Event) -> None:
        with self._changed:
            if len(self._events) >= self._most:
                event = self._events.pop().merged(event)
            self._events.append(event)
            self._notify()

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()

    def _outcome(self) -> Result:
        self._raise()
        assert self._request.result is not None
        return cast(Result, self._request.result)

    def _raise(self) -> None:
        if self._request.error is not None:
            raise self._request.error
