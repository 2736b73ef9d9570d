"""Prompts to token ids, in threads of their own, so that a long prompt holds up nobody else's.

How long a tokenizer takes is not known from the size of its input: a word of combining marks takes
hundreds of times longer than prose.  So what cannot fit the context is refused unread, long prompts
have threads and copies of the tokenizer of their own, in which clients take turns, and the rest of
a request whose client has left, or whose deadline has passed, is not read.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.errors import CancelledError, ConfigError, PromptError, QueueFullError
from .http import outcome

if TYPE_CHECKING:
    from ..models import DiffusionModel

T = TypeVar("T")
CHARACTERS_PER_TOKEN = 16  # prose has 4, indented code up to 8
LONG = 20_000  # characters from which on a request waits in the other line
THREADS = 2  # of that line
MOST_LONG = 16  # requests that may be in it
SHARE = 4  # of them of one client
LOOK = 0.05  # seconds between two looks whether what runs has ended


class FairQueue:
    """Work that may take long, in threads of its own: clients take turns, one at a time each."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(THREADS, name)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._working: set[str] = set()

    def submit(self, client: str, work: Callable[[], T]) -> Future[T]:
        """Begin ``work`` when it is the client's turn."""
        future: Future[T] = Future()
        with self._lock:
            mine = self._count(client)
            every = sum(map(self._count, self._waiting.keys() | self._working))
            if mine >= SHARE or every >= MOST_LONG:
                whose = f"{mine} of yours" if mine >= SHARE else f"{every}"
                raise QueueFullError(
                    "long prompts, new structures and holes without a length are prepared "
                    f"one after the other, and {whose} wait already: send fewer at a time"
                )
            self._waiting.setdefault(client, deque()).append((future, work))
        self._pool.submit(self._next)
        return future

    @property
    def busy(self) -> bool:
        """Whether somebody is at work."""
        return bool(self._working)

    def _count(self, client: str) -> int:
        """What a client has at work and waiting."""
        waiting = self._waiting.get(client, ())
        return (client in self._working) + sum(not future.cancelled() for future, _ in waiting)

    def _next(self) -> None:
        """Do the first job of the next client in the queue of whom no job is at work."""
        with self._lock:
            client = next((one for one in self._waiting if one not in self._working), None)
            if client is None:
                return
            mine = self._waiting.pop(client)
            future, work = mine.popleft()
            if mine:
                self._waiting[client] = mine  # goes to the end
            self._working.add(client)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        with self._lock:
            self._working.remove(client)
            again = bool(self._waiting)
        if again:
            with suppress(RuntimeError):  # the pool is closed
                self._pool.submit(self._next)

    def close(self) -> None:
        with self._lock:
            left = [future for mine in self._waiting.values() for future, _ in mine]
        for future in left:
            future.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)


class Encoder:
    """The lines in which requests wait for the tokenizer of ``model``.  ``limit``: most tokens of a
    prompt, None for the model's context; ``give_up`` ends work that may take a minute."""

    def __init__(
        self, model: DiffusionModel, limit: int | None = None,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.give_up = give_up
        self.model, self.limit = model, limit or model.facts.context_length
        self._short = ThreadPoolExecutor(1, "dllm-encode")
        self._long = FairQueue("dllm-encode-long")
        self._own = threading.local()
        self._closed = False

    def _twin(self) -> DiffusionModel:
        """The model with a tokenizer of this thread."""
        if not hasattr(self._own, "model"):
            self._own.model = with_own_tokenizer(self.model)
        model: DiffusionModel = self._own.model
        return model

    async def run(
        self, work: Callable[[DiffusionModel, Callable[[], None]], T], texts: Sequence[Any],
        until: float, undo: Callable[[T], None] = lambda _: None, slow: bool = False,
        client: str = "",
    ) -> T:  # fmt: skip
        """What ``work(model, go_on)`` returns in one of the threads.

        ``work`` encodes ``texts`` (strings, messages or ids) with the tokenizer of ``model`` and
        calls ``go_on`` between them, which raises when the client has left or ``until``, see
        `outcome`, has passed.  ``undo`` gets a result that nobody waits for any more.
        ``slow``: that it may take long for other reasons than its length; ``client``: who asks.
        """
        characters = check(texts, self.limit)
        left = threading.Event()

        def go_on() -> None:
            if left.is_set() or self._closed:
                raise CancelledError("nobody waits any more, or the server is stopping")

        def begin(model: Callable[[], DiffusionModel]) -> T:
            go_on()
            try:
                return work(model(), go_on)
            except ConfigError:  # of a structure that `close` gave up
                go_on()
                raise

        if characters <= LONG and not slow:
            future = self._short.submit(begin, lambda: self.model)
        else:
            future = self._long.submit(client, lambda: begin(self._twin))
        try:
            return await outcome(future, until)
        except BaseException:
            left.set()
            if not future.cancel():
                future.add_done_callback(lambda done: _undo_result(done, undo))
            raise

    def close(self) -> None:
        """End what runs and what waits."""
        self._closed = True
        while self._long.busy:
            self.give_up()
            time.sleep(LOOK)
        self._short.shutdown(wait=True, cancel_futures=True)
        self._long.close()


def check(texts: Sequence[Any], limit: int) -> int:
    """Characters of all ``texts`` (strings, messages or ids); `PromptError` for one that cannot fit
    the context of ``limit`` tokens, however it is encoded."""
    most, sizes = CHARACTERS_PER_TOKEN * limit, [0]
    for text in filter(None, texts):
        if isinstance(text, list) and len(text) > limit:
            what = "tokens" if is_ids(text) else "parts"
            raise PromptError(f"the prompt has {len(text)} {what}, the context {limit} tokens")
        sizes.append(sum(map(len, strings_of(text))))
        if sizes[-1] > most:
            raise PromptError(
                f"the prompt has {sizes[-1]} characters; at most {most} are read for the context "
                f"of {limit} tokens: shorten it"
            )
    return sum(sizes)


def _undo_result(future: Future[T], undo: Callable[[T], None]) -> None:
    if not future.cancelled() and future.exception() is None:
        undo(future.result())


def with_own_tokenizer(model: DiffusionModel) -> DiffusionModel:
    """The model for another thread: a tokenizer serves one at a time."""
    return replace(model, tokenizer=copy.deepcopy(model.tokenizer))


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and type(value[0]) is int


def strings_of(value: Any) -> Iterator[str]:
    """All strings in a JSON value that is not token ids."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings_of(item)
    elif isinstance(value, list) and not is_ids(value):
        for item in value:
            yield from strings_of(item)
