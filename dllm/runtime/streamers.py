"""Streamers of transformers: whoever takes ids as they become final, and maybe drafts.

`dllm.generate`, `dllm.speculate` and the bridge to transformers' own ``generate`` all stream
through `feeding`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from ..core.canvas import IntArray
from ..core.errors import ConfigError, short
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

    def begin(self, prompt: IntArray) -> None:
        """The prompt's ids (L,), which transformers hands over as a batch of one."""
        if not self._begun:
            self._begun = True
            self.streamer.put(torch.from_numpy(prompt.copy())[None])

    def give(self, tokens: Sequence[int]) -> None:
        """Ids that have become final."""
        if len(tokens):
            self.streamer.put(torch.tensor(tokens))

    def take(self, event: Event) -> None:
        """The next event of a row."""
        canvas = event.canvas
        self.begin(canvas.tokens[: canvas.prompt_length])
        self.give(event.tokens)
        put_draft: Any = getattr(self.streamer, "put_draft", None)
        if put_draft is not None and event.result is None:
            tail = np.asarray(event.tail, np.int64)
            put_draft(torch.from_numpy(np.where(tail < 0, canvas.mask_id, tail)))


@contextmanager
def feeding(streamer: Streamer) -> Iterator[Feed]:
    """A feed that ends whatever happens, so that a reader in another thread does not wait for ever:
    everything that can fail belongs inside."""
    has = all(callable(getattr(streamer, name, None)) for name in ("put", "end"))
    if not has or isinstance(streamer, type):
        raise ConfigError(
            "a streamer is an object with the methods put and end, as transformers' TextStreamer, "
            f"not {short(streamer)}"
        )
    try:
        yield Feed(streamer)
    finally:
        streamer.end()
