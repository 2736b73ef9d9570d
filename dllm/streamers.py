"""Streamers of transformers: whoever takes ids as they become final, and maybe drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from .events import Event


class Streamer(Protocol):
    """transformers' ``TextStreamer``, ``TextIteratorStreamer`` and whatever looks like them.  One
    that has ``put_draft``, as ``TextDiffusionStreamer``, is also shown what is not final yet."""

    def put(self, value: torch.Tensor) -> None: ...
    def end(self) -> None: ...


class Feed:
    """Hands a streamer the prompt, what becomes final up to the first stop id, and drafts."""

    def __init__(self, streamer: Streamer) -> None:
        self.streamer = streamer
        self._begun = False

    def take(self, event: Event) -> None:
        """The next event of the row."""
        canvas = event.canvas
        if not self._begun:
            self._begun = True
            self.streamer.put(torch.from_numpy(canvas.tokens[: canvas.prompt_length].copy()))
        if event.final:
            self.streamer.put(torch.tensor(event.final))
        put_draft: Any = getattr(self.streamer, "put_draft", None)
        if put_draft is not None and event.result is None:
            tail = np.asarray(event.tail, np.int64)
            put_draft(torch.from_numpy(np.where(tail < 0, canvas.mask_id, tail)))


@contextmanager
def feeding(streamer: Streamer | None) -> Iterator[Feed | None]:
    """A feed that ends whatever happens: a reader in another thread does not wait for ever."""
    try:
        yield None if streamer is None else Feed(streamer)
    finally:
        if streamer is not None:
            streamer.end()
