"""Prompts to token ids, in threads of their own, so that a long prompt holds up nobody else's.

How long a tokenizer takes is not known from the size of its input: a word of combining marks takes
hundreds of times longer than prose.  So what cannot fit the context is refused unread, long prompts
have a thread and a copy of the tokenizer of their own, and the rest of a request whose client has
left, or whose deadline has passed, is not read.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.errors import CancelledError, DeadlineError, PromptError, QueueFullError
from .http import outcome

if TYPE_CHECKING:
    from ..models import DiffusionModel

T = TypeVar("T")
CHARACTERS_PER_TOKEN = 16  # prose has 4, indented code up to 8
LONG = 20_000  # characters from which on a request waits in the other line
MOST_LONG = 8  # long requests that may wait


class Encoder:
    """The lines in which requests wait for the tokenizer of ``model``.  ``limit``: most tokens of a
    prompt, None for the model's context."""

    def __init__(self, model: DiffusionModel, limit: int | None = None) -> None:
        self.model, self.limit = model, limit or model.facts.context_length
        self._short = ThreadPoolExecutor(1, "dllm-encode")
        self._long = ThreadPoolExecutor(1, "dllm-encode-long")
        self._room = threading.BoundedSemaphore(MOST_LONG)

    @cached_property
    def _twin(self) -> DiffusionModel:
        return with_own_tokenizer(self.model)

    def check(self, texts: Sequence[Any]) -> int:
        """Characters of all ``texts`` (strings, messages or ids); `PromptError` for one that cannot
        fit the context, however it is encoded."""
        most, sizes = CHARACTERS_PER_TOKEN * self.limit, [0]
        for text in texts:
            if is_ids(text) and len(text) > self.limit:
                raise PromptError(f"the prompt has {len(text)} tokens, the context {self.limit}")
            sizes.append(sum(map(len, strings_of(text))))
            if sizes[-1] > most:
                raise PromptError(
                    f"the prompt has {sizes[-1]} characters; at most {most} are read for a context "
                    f"of {self.limit} tokens: shorten it"
                )
        return sum(sizes)

    async def run(
        self, work: Callable[[DiffusionModel, Callable[[], None]], T], texts: Sequence[Any],
        until: float, undo: Callable[[T], None] = lambda _: None, slow: bool = False,
    ) -> T:  # fmt: skip
        """What ``work(model, go_on)`` returns in one of the threads.

        ``work`` encodes ``texts`` (strings, messages or ids) with the tokenizer of ``model`` and
        calls ``go_on`` between them, which raises when the client has left or ``until`` (of
        `time.monotonic`) has passed.  ``undo`` gets a result that nobody waits for any more.
        ``slow``: that it may take long for other reasons than its length.
        """
        characters = self.check(texts)
        left = threading.Event()

        def go_on() -> None:
            if left.is_set():
                raise CancelledError("the client has left")
            if time.monotonic() > until:
                raise DeadlineError("the prompt was not read by the deadline")

        def begin(model: Callable[[], DiffusionModel]) -> T:
            go_on()
            return work(model(), go_on)

        if characters <= LONG and not slow:
            future = self._short.submit(begin, lambda: self.model)
        elif self._room.acquire(blocking=False):
            future = self._long.submit(begin, lambda: self._twin)
            future.add_done_callback(lambda _: self._room.release())
        else:
            raise QueueFullError(f"{MOST_LONG} long prompts wait already")
        try:
            return await outcome(future)
        except BaseException:
            left.set()
            if not future.cancel():
                future.add_done_callback(lambda done: _undone(done, undo))
            raise

    def close(self) -> None:
        for pool in (self._short, self._long):
            pool.shutdown(wait=True, cancel_futures=True)


def _undone(future: Future[T], undo: Callable[[T], None]) -> None:
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
