"""A scheduler that is driven to its end in the caller's thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

from ..request.request import Request
from .events import Event, Reader
from .events import events as events_of
from .result import Result
from .scheduler import Progress, Scheduler
from .streamers import Feed


def completed(
    scheduler: Scheduler, title: str | None = None, feed: Feed | None = None
) -> list[Result]:
    """All results, in the order of the requests; the first error is raised.  With a ``title`` a bar
    is shown; ``feed`` gets the events."""
    requests = list(scheduler.waiting)
    bar = nullcontext() if title is None else Bar(title, requests)
    with bar as shown:
        for progress in steps(scheduler):
            if feed is not None:
                for _, event in events_of(progress):
                    feed.take(event)
            if shown is not None:
                shown.update()
    return [request.result for request in requests if request.result is not None]


def each(scheduler: Scheduler) -> Iterator[tuple[int, Result]]:
    """(index, result) of every request as it is finished; the first error is raised."""
    for progress in steps(scheduler):
        for request, _ in progress:
            if request.result is not None:
                yield request.index, request.result


def events(scheduler: Scheduler) -> Iterator[Event]:
    """An event, with its text, per request and step; the first error is raised."""
    readers: dict[int, Reader] = {}
    for progress in steps(scheduler):
        for request, event in events_of(progress):
            reader = readers.get(request.index)
            if reader is None:
                reader = Reader(scheduler.model, request.recipe.config)
                readers[request.index] = reader
            if event.result is not None:
                del readers[request.index]
            yield reader.read(event)


def steps(scheduler: Scheduler) -> Iterator[Progress]:
    """What every step did; the first error is raised.  A generator that is closed early leaves
    nothing behind."""
    with closing(scheduler):
        while scheduler.busy:
            progress = scheduler.advance()
            for request, _ in progress:
                if request.error is not None:
                    raise request.error
            yield progress


class Bar:
    """A bar of decided tokens and finished texts on stderr."""

    def __init__(self, title: str, requests: list[Request]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = ("{task.description}", BarColumn(), "{task.completed}/{task.total} tokens",
                   TextColumn("{task.fields[rows]}"), TextColumn("{task.fields[rate]}"),
                   TimeRemainingColumn())  # fmt: skip
        self.requests = requests
        self.progress = Progress(*columns, console=Console(stderr=True))
        total = sum(request.size for request in requests)
        self.task = self.progress.add_task(title, total=total, rows="", rate="")

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def update(self) -> None:
        """Look at every row."""
        decided = forwards = done = 0
        for request in self.requests:
            done += request.result is not None
            if request.result is not None:
                decided, forwards = decided + request.size, forwards + request.result.nfe
            elif request.canvas is not None:
                decided += request.size - int(request.canvas.masked.sum())
                forwards += request.canvas.nfe
        rate = f"{decided / max(1, forwards):.2f} tokens per forward"
        rows = f"{done}/{len(self.requests)} texts" if len(self.requests) > 1 else ""
        self.progress.update(self.task, completed=decided, rate=rate, rows=rows)
