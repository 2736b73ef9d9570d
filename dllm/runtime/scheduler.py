"""Requests in, results out: who is admitted, whose step runs now, what has become of each.

A request waits until the engine has room for its row, takes part in every step from then on, and
leaves when its text is finished, when it is cancelled or when it fails.  First come, first served:
how long a row will take cannot be known when it is admitted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..core.canvas import Canvas, IntArray
from ..core.errors import CancelledError, DeadlineError
from ..core.text import stop_at
from ..engine.memory import PeakMemory
from ..engine.work import Row, Step, Work
from ..models import DiffusionModel
from ..request.request import Request
from ..request.request_maker import RequestMaker
from ..request.stopping import stop_floor
from ..samplers.eos import stops
from .result import Result
from .trace import Trace

Progress = list[tuple[Request, Step | None]]  # None: finished without a step of its own


class Scheduler:
    """Decodes requests with one engine of either kind.  Not thread-safe: one thread drives it."""

    def __init__(self, model: DiffusionModel, engine: Work[Any, Any]) -> None:
        self.model, self.engine = model, engine
        self.waiting: deque[Request] = deque()
        self.running: dict[Row, Request] = {}
        self.memory = PeakMemory(model.device)
        self._deadlines: set[Request] = set()

    @classmethod
    def of(cls, maker: RequestMaker, requests: Sequence[Request]) -> Scheduler:
        """With an engine that holds the largest ``requests``, and all of them in its queue."""
        scheduler = cls(maker.model, maker.engine_for(requests))
        for request in requests:
            request.submitted = time.perf_counter()  # making the engine was no waiting
            scheduler.add(request)
        return scheduler

    @property
    def busy(self) -> bool:
        """Whether anybody waits for a place, or could take a step."""
        return bool(self.waiting) or any(
            self.engine.takes_room(row) or self.engine.ready(row) for row in self.running
        )

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        (self.waiting.appendleft if request.at_once else self.waiting.append)(request)
        if request.deadline is not None:
            self._deadlines.add(request)

    def cancel(self, request: Request, error: BaseException | None = None) -> None:
        """Let a request go: its slots are free at once."""
        if request.done:
            return
        if request.row is not None:
            self.engine.drop(request.row)
            self.running.pop(request.row, None)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.error = error or CancelledError("the request was cancelled")
        request.canvas = None

    def close(self) -> None:
        """Cancel everybody and give the engine's memory back."""
        for request in [*self.waiting, *self.running.values()]:
            self.cancel(request)
        self.engine.close()

    def advance(self) -> Progress:
        """Admit, step, and say what happened to whom."""
        progress: Progress = [(request, None) for request in self._admit()]
        if not self.running:
            return progress
        for step in self.engine.step([*self.running]):
            request = self.running[step.row]
            if request.trace is not None:
                request.trace.add(step)
            if step.canvas.finished and step.row.error is None:
                self._finish(request)
            progress.append((request, step))
        for row, request in list(self.running.items()):
            if row.error is not None:
                self.running.pop(row)
                request.error = row.error
                progress.append((request, None))
        return progress

    def expire(self) -> list[Request]:
        """Let go whose deadline has passed, and say who that was.

        Apart from `advance` because it looks at a clock: all else is a function of what was added
        and cancelled, so that several processes can take the same steps.
        """
        if not self._deadlines:
            return []
        now, late = time.perf_counter(), []
        self._deadlines = {request for request in self._deadlines if not request.done}
        for request in list(self._deadlines):
            if request.deadline is not None and now - request.submitted > request.deadline:
                error = DeadlineError(f"not answered within {request.deadline:g} s")
                self.cancel(request, error)
                late.append(request)
        return late

    def _admit(self) -> list[Request]:
        """Let requests in as long as there is room; those that are done already."""
        done: list[Request] = []
        while self.waiting:
            request = self.waiting[0]
            if not request.at_once and not self.engine.room:
                return done
            try:
                canvas = request.canvas = request.canvas or request.make()
                trace = self._trace(request, canvas) if request.traced else None
                row = self.engine.admit(canvas, request.recipe)
            except Exception as error:
                self.waiting.popleft()
                request.error = error
                done.append(request)
                continue
            if row is None:
                return done
            self.waiting.popleft()
            request.row, request.trace = row, trace
            request.queue_seconds = time.perf_counter() - request.submitted
            self.running[row] = request
            if canvas.finished:
                self._finish(request)
                done.append(request)
        return done

    def _trace(self, request: Request, canvas: Canvas) -> Trace:
        names = request.recipe.sampler.spec, self.engine.cache_name, self.model.name
        return Trace.start(canvas, *names)

    def _finish(self, request: Request) -> None:
        """Turn a finished canvas into a result."""
        assert request.row is not None and request.canvas is not None
        self.running.pop(request.row, None)
        request.result = self._result(request, request.row, request.canvas)

    def _result(self, request: Request, row: Row, canvas: Canvas) -> Result:
        tokenizer, config = self.model.tokenizer, request.recipe.config
        if request.trace is not None:
            request.trace.close(canvas, tokenizer.decode if tokenizer else None)
        tokens, reason = answer(canvas, request.stop_ids)
        if config.formatted or (canvas.holes and request.recipe.sampler.length is None):
            reason = "stop"  # the form is complete, every hole full
        low = canvas.prompt_length
        here = slice(low, low + len(tokens))
        fields: dict[str, Any] = {
            "holes": hole_texts(
                self.model, tokens, [(h.low - low, h.high - low) for h in canvas.holes]
            ),
            "text": text_of(
                self.model, tokens, config.stop_strings, stop_floor(canvas, config) - low
            ),
            "tokens": tokens.tolist(),
            "sequences": canvas.tokens.copy(),
            "prompt_length": canvas.prompt_length,
            "nfe": canvas.nfe,
            "computed": canvas.computed,
            "forced": canvas.forced,
            "order": canvas.commit_step[here].tolist(),
            "logprobs": canvas.logprob[here].copy(),
            "finish_reason": reason,
            "seconds": row.seconds,
            "peak_memory": self.memory.peak(),
            "seed": config.seed,
            "trace": request.trace,
            "cache_bytes": self.engine.cache_bytes,
            "queue_seconds": request.queue_seconds or 0.0,
            "restarts": row.restarts,
            "schema": config.json_schema,
            "canvas": canvas.region[1] - canvas.region[0],
            "probes": canvas.probes,
        }
        kind = self.engine.kind or Result
        return kind(**fields | self.engine.figures(row))


def answer(canvas: Canvas, stop_ids: tuple[int, ...]) -> tuple[IntArray, str]:
    """Ids of the answer, and why they end.  A text with holes is its own answer, all of it."""
    end = canvas.end if canvas.end == canvas.length else canvas.length
    tokens = canvas.tokens[canvas.prompt_length : end]
    where = stops(canvas, canvas.prompt_length, end, stop_ids)
    if where.size:
        return canvas.tokens[canvas.prompt_length : int(where[0]) + 1], "stop"
    return tokens, canvas.finish_reason or "length"


def hole_texts(
    model: DiffusionModel, tokens: IntArray, holes: Sequence[tuple[int, int]]
) -> list[str]:
    """What each of the ``holes`` adds to the text before it: tokenizers write a token differently
    at the start of a text."""
    texts = []
    for low, high in holes:
        before, after = (text_of(model, tokens[:end], ()) for end in (low, high))
        alone = not after.startswith(before)
        texts.append(text_of(model, tokens[low:high], ()) if alone else after[len(before) :])
    return texts


def text_of(
    model: DiffusionModel, tokens: IntArray, stop_strings: tuple[str, ...], floor: int = 0
) -> str:
    """The answer as text, cut where the first stop string begins that is not complete within the
    first ``floor`` tokens."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return ""

    def decode(ids: IntArray) -> str:
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    text = decode(tokens)
    return text[: stop_at(text, stop_strings, len(decode(tokens[:floor])) if floor > 0 else 0)]
