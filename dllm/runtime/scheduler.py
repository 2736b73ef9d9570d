"""Requests in, results out: who is admitted, whose step runs now, what has become of each.

A request waits until the engine has room for its row, takes part in every step from then on, and
leaves when its text is finished, when it is cancelled or when it fails.  First come, first served:
how long a row will take cannot be known when it is admitted.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, Self

from ..core.errors import FAILURES, CancelledError, DeadlineError, failure
from ..engine.memory import PeakMemory
from ..engine.work import Row, Step, Work
from ..request.request import Request
from .events import Event, Progress, Reader, events
from .result import Result
from .trace import Trace

WAITING = 64  # requests that are taken from an iterator before there is room for them


class Scheduler:
    """Decodes requests with one engine of either kind.  Not thread-safe: one thread drives it."""

    def __init__(self, engine: Work[Any, Any]) -> None:
        self.engine, self.model = engine, engine.model
        self.waiting: deque[Request] = deque()
        self.running: dict[Row, Request] = {}
        self.memory = PeakMemory(engine.model.device)
        self._deadlines: set[Request] = set()

    @classmethod
    def of(cls, engine: Work[Any, Any], requests: Sequence[Request]) -> Self:
        """With all the ``requests`` in its queue."""
        scheduler = cls(engine)
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
        outside = request.recipe.outside  # it takes nobody's place, and overtakes those that wait
        (self.waiting.appendleft if outside else self.waiting.append)(request)
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
        for step in self.engine.step([*self.running], self.engine.overlaps):
            request = self.running[step.row]
            if step.canvas.finished and step.row.error is None:
                self._finish(request, step)
            elif request.trace is not None:
                request.record(step)
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
                self.cancel(request, DeadlineError(f"not answered within {request.deadline:g} s"))
                late.append(request)
        return late

    def _admit(self) -> list[Request]:
        """Let requests in as long as there is room; those that are done already."""
        done: list[Request] = []
        while self.waiting:
            request = self.waiting[0]
            if not request.recipe.outside and not self.engine.room:
                return done
            try:
                canvas = request.canvas = request.canvas or request.make()
                trace = None
                if request.traced:
                    names = request.recipe.sampler.spec, self.engine.cache_name, self.model.name
                    trace = Trace.start(canvas, *names)
                row = self.engine.admit(canvas, request.recipe)
            except FAILURES as error:
                self.waiting.popleft()
                request.error = failure(error)
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

    def _finish(self, request: Request, step: Step | None = None) -> None:
        """Turn a finished canvas into a result; a tokenizer may refuse to."""
        assert request.row is not None
        self.running.pop(request.row, None)
        kind = self.engine.kind or Result
        try:
            if step is not None and request.trace is not None:
                request.record(step)
            request.result = kind.of(request, self.engine, self.memory.peak())
        except FAILURES as error:
            request.error = failure(error)

    # -- driven to its end in the caller's thread; the first error is raised ----------------------

    def steps(self, arriving: Iterator[Request] | None = None) -> Iterator[Progress]:
        """What every step did.  A generator that is closed early leaves nothing behind.
        ``arriving``: further requests, which are taken as there is room for them."""
        with closing(self):
            while self.busy or arriving is not None:
                while arriving is not None and len(self.waiting) <= min(self.engine.room, WAITING):
                    request = next(arriving, None)
                    if request is None:
                        arriving = None
                        break
                    request.submitted = time.perf_counter()
                    self.add(request)
                progress = self.advance()
                for request, _ in progress:
                    if request.error is not None:
                        raise request.error
                yield progress

    def completed(self, follow: Callable[[Event], None] | None = None) -> list[Any]:
        """All results, in the order of the requests; ``follow`` gets the events."""
        requests = list(self.waiting)
        for progress in self.steps():
            if follow is not None:
                for _, event in events(progress):
                    follow(event)
        return [request.result for request in requests if request.result is not None]

    def each(self, arriving: Iterator[Request] | None = None) -> Iterator[tuple[int, Any]]:
        """(index, result) of every request, the ``arriving`` ones too, as it is finished."""
        for progress in self.steps(arriving):
            for request, _ in progress:
                if request.result is not None:
                    yield request.index, request.result

    def events(self) -> Iterator[Event]:
        """An event, with its text, per request and step."""
        readers: dict[int, Reader] = {}
        for progress in self.steps():
            for request, event in events(progress):
                reader = readers.get(request.index)
                if reader is None:
                    reader = readers[request.index] = Reader(self.model, request.recipe.config)
                if event.result is not None:
                    del readers[request.index]
                yield reader.read(event)
