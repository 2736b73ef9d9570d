"""What the model says of given texts, in a thread of its own: likelihoods, and single steps."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from ..core.errors import CancelledError, QueueFullError
from ..likelihood.api import score
from ..likelihood.scoring import Scoring
from ..likelihood.step import Guesses, step
from ..likelihood.tokens import TokenScores, token_scores
from ..models import DiffusionModel
from .encoding import Encoder, check, with_own_tokenizer
from .http import outcome

T = TypeVar("T")
MOST_WAITING = 8  # requests


class Likelihoods:
    """The line in which requests wait whose texts ``encoder`` lets pass; one runs at a time, each
    has ``deadline`` seconds."""

    def __init__(self, encoder: Encoder, deadline: float) -> None:
        self.encoder, self.deadline = encoder, deadline
        self._thread = ThreadPoolExecutor(1, "dllm-score")
        self._room = threading.BoundedSemaphore(MOST_WAITING)
        self._closed = False

    @cached_property
    def _model(self) -> DiffusionModel:
        return with_own_tokenizer(self.encoder.model)

    async def score(self, prompt: Any, texts: list[str], how: dict[str, Any]) -> list[Any]:
        """Likelihoods of ``texts`` after ``prompt``."""
        likelihoods: Any = score  # overloaded
        return await self._in_turn([prompt, *texts], lambda go_on: likelihoods(
            self._model, [prompt] * len(texts), texts, before_forward=go_on, **how
        ))  # fmt: skip

    async def step(self, prompt: Any, text: Any, how: dict[str, Any]) -> Guesses:
        """What the model predicts at the holes of ``text``."""

        def work(go_on: Callable[[], None]) -> Guesses:
            go_on()
            return step(self._model, text, prompt=prompt, **how)

        return await self._in_turn([prompt, text], work)

    async def tokens(self, prompts: Sequence[Any], top: int, until: float) -> list[TokenScores]:
        """How likely the tokens of ``prompts`` (ids) are, and ``top`` others beside each;
        ``until``: see `outcome`."""

        def work(go_on: Callable[[], None]) -> list[TokenScores]:
            how = Scoring(before_forward=go_on)
            return [token_scores(self._model, ids, top, how) for ids in prompts]

        return await self._in_turn([ids.tolist() for ids in prompts], work, until)

    async def _in_turn(
        self, texts: Sequence[Any], work: Callable[[Callable[[], None]], T],
        until: float | None = None,
    ) -> T:  # fmt: skip
        """What ``work(go_on)`` on ``texts`` returns; ``go_on`` raises once nobody waits for it."""
        check(texts, self.encoder.limit)
        if not self._room.acquire(blocking=False):
            raise QueueFullError(f"{MOST_WAITING} requests for likelihoods wait already")
        left = threading.Event()

        def go_on() -> None:
            if left.is_set() or self._closed:
                raise CancelledError("the server is stopping")

        future = self._thread.submit(work, go_on)
        future.add_done_callback(lambda _: self._room.release())
        try:
            return await outcome(future, until or time.monotonic() + self.deadline)
        finally:
            left.set()
            future.cancel()  # if it has not begun

    def close(self) -> None:
        """End what runs and what waits."""
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
