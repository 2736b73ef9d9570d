"""Streamers of transformers: whoever takes ids as they become final, and maybe drafts.

`dllm.generate` and `dllm.speculate` stream through `feeding`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from ..core.errors import ConfigError, short
from .events import Event


class Streamer(Protocol):
    """transformers' ``TextStreamer``, ``TextIteratorStreamer`` and whatever looks like them.  One
    that has ``put_draft``, as ``TextDiffusionStreamer``, is also shown what is not final yet."""

    def put(self, value: torch.Tensor) -> None: ...
    def end(self) -> None: ...


@contextmanager
def feeding(streamer: Streamer) -> Iterator[Callable[[Event], None]]:
    """What hands a streamer the events of a row: the prompt, ids as they become final, up to the
    first stop id, and drafts.  Its end is told whatever happens, so that a reader in another thread
    does not wait for ever: everything that can fail belongs inside."""
    has = all(callable(getattr(streamer, name, None)) for name in ("put", "end"))
    if not has or isinstance(streamer, type):
        raise ConfigError(
            "a streamer is an object with the methods put and end, as transformers' TextStreamer, "
            f"not {short(streamer)}"
        )
    begun = False

    def take(event: Event) -> None:
        nonlocal begun
        canvas = event.canvas
        if not begun:  # transformers hands the prompt over as a batch of one
            begun = True
            streamer.put(torch.from_numpy(canvas.tokens[: canvas.prompt_length].copy())[None])
        if event.tokens:
            streamer.put(torch.tensor(event.tokens))
        put_draft: Any = getattr(streamer, "put_draft", None)
        if put_draft is not None and event.result is None:
            tail = np.asarray(event.tail, np.int64)
            put_draft(torch.from_numpy(np.where(tail < 0, canvas.mask_id, tail)))

    try:
        yield take
    finally:
        streamer.end()
