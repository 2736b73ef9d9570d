"""A streamed answer: its lines, and a reader that leaves."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from dllm.core.errors import DeadlineError
from dllm.serve.http import event, outcome
from dllm.serve.stream import Stream

from .conftest import CHAT, Served, posted, raw


@pytest.mark.parametrize("turns", range(8))
def test_a_reader_may_leave_in_the_moment_in_which_something_happens(turns: int) -> None:
    """The stream ends, whatever of the two the event loop comes to first."""

    async def leaves() -> None:
        happens = asyncio.Event()

        class Handle:
            async def __aiter__(self) -> AsyncIterator[None]:
                await happens.wait()
                yield None
                await asyncio.Event().wait()

            def cancel(self) -> None:
                pass

        nothing: Any = SimpleNamespace(handles=[Handle()], opening=list)
        stream = Stream(nothing, nothing, nothing, nothing, 0.0)
        stream._chunks = lambda index, happened: []  # type: ignore[method-assign]
        reading = asyncio.ensure_future(anext(aiter(stream)))
        await asyncio.sleep(0.01)
        happens.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading}, timeout=1.0)
        assert reading.cancelled()

    asyncio.run(leaves())


def test_an_event_is_one_line_for_every_client() -> None:
    """httpx ends lines at the separators of Unicode, too."""
    said = {"content": "a\x85b\u2028c\u2029d\r\ne"}
    (data, *rest) = event(said).decode().splitlines()
    assert json.loads(data.removeprefix("data: ")) == said and rest == [""]


def test_what_one_event_says_is_one_write(served: Served) -> None:
    """Text, end and usage of an answer of one step: two, with the mark behind the last event."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True,
            "sampler": "llada(steps=1)", "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    sent = posted(CHAT, body).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    parts = raw(served, sent).partition(b"\r\n\r\n")[2].split(b"\r\n")
    assert [part.count(b"data: ") for part in parts[1::2]] == [2, 2, 0]


def test_a_timeout_of_the_work_is_no_deadline() -> None:
    work = Future[None]()
    work.set_exception(TimeoutError("of a disk"))
    with pytest.raises(TimeoutError, match="of a disk") as caught:
        asyncio.run(outcome(work, time.monotonic() + 60))
    assert not isinstance(caught.value, DeadlineError)
