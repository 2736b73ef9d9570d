"""What users call: generate, stream, as_completed, infill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from typing import Any, Literal, Unpack, overload

from .cache.base import CacheLike
from .config import GenerationArguments, GenerationConfig
from .errors import ConfigError
from .events import Event, Reader, events
from .models import load
from .preparation import Preparation
from .prompts import ManyPrompts, OnePrompt, encode_holes, is_batch
from .result import Result
from .samplers.compose import SamplerLike
from .scheduler import Request, Scheduler
from .streamers import Feed, Streamer, feeding

ModelLike = Any  # DiffusionModel, PreTrainedModel, hub id, folder or bundled name


class Options(GenerationArguments, total=False):
    """What every call takes: a sampler, a cache, and the fields of a `GenerationConfig`."""

    sampler: SamplerLike
    cache: CacheLike
    chat: bool | None
    trace: bool
    config: GenerationConfig | None


class GenerateOptions(Options, total=False):
    """What `generate` takes beside."""

    progress: bool
    streamer: Streamer | None
    repetitions: Sequence[int] | None


@overload
def generate(
    model: ModelLike, prompt: ManyPrompts, *, n: Literal[1] = 1, **options: Unpack[GenerateOptions]
) -> list[Result]: ...
@overload
def generate(
    model: ModelLike, prompt: OnePrompt, *, n: Literal[1] = 1, **options: Unpack[GenerateOptions]
) -> Result: ...
@overload
def generate(
    model: ModelLike, prompt: ManyPrompts, *, n: int, **options: Unpack[GenerateOptions]
) -> list[list[Result]]: ...
@overload
def generate(
    model: ModelLike, prompt: OnePrompt, *, n: int, **options: Unpack[GenerateOptions]
) -> list[Result]: ...
def generate(
    model: ModelLike,
    prompt: Any,
    *,
    sampler: SamplerLike = "threshold",
    cache: CacheLike = "none",
    chat: bool | None = None,
    n: int = 1,
    trace: bool = False,
    progress: bool = False,
    streamer: Streamer | None = None,
    repetitions: Sequence[int] | None = None,
    config: GenerationConfig | None = None,
    **arguments: Unpack[GenerationArguments],
) -> Any:
    """Write an answer to ``prompt``, or to each of several prompts.

    ``model``: what `dllm.load` returns, or anything it takes.  ``prompt``: a string, chat messages
    (``[{"role": "user", "content": ...}]``) or token ids; a list of these is a batch, whose rows
    may differ in length and come out as if each had run alone.  At most ``max_rows`` of them are
    decoded at a time; when one is finished, the next joins.  ``sampler``, ``cache``: names such as
    ``"threshold(tau=0.8)"`` and ``"dual"``, or objects; see `dllm.samplers.available` and
    `dllm.cache.available`.  ``chat``: whether a string goes through the chat template (default:
    when there is one).  ``n``: answers per prompt, each with noise of its own; at temperature 0
    they differ only where the sampler draws, as ``"llada(remasking=random)"`` does.  ``trace``
    keeps every step in ``result.trace``; ``progress`` shows a bar on stderr; ``streamer`` (one
    prompt only) receives what is final as it is decided, and drafts where it has ``put_draft``.
    ``repetitions``: per prompt how many times it was answered before, so that a new answer draws
    new noise; by default equal prompts of a batch are counted, from 0.  ``config``: a
    `dllm.GenerationConfig` in place of the checkpoint's defaults; ``arguments``: single fields of
    it.

    Returns a `Result`, or a list of them for a list of prompts; with ``n`` > 1 a list of ``n`` in
    place of each.  Raises `dllm.DllmError` with one sentence that says what to do.
    """
    with feeding(streamer) as feed:
        loaded = load(model)
        prompts = list(prompt) if is_batch(prompt) else [prompt]
        how = Preparation.of(loaded, sampler, cache, config, arguments)
        requests = how.prompts(prompts, chat, repetitions, n, trace)
        if feed is not None and len(requests) > 1:
            raise ConfigError("a streamer follows one answer: pass prompts one by one")
        results = _completed(how.scheduler(requests), how, progress, feed)
    grouped = [results[i : i + n] for i in range(0, len(results), n)] if n > 1 else results
    return grouped if is_batch(prompt) else grouped[0]


def as_completed(
    model: ModelLike,
    prompts: Sequence[Any],
    *,
    sampler: SamplerLike = "threshold",
    cache: CacheLike = "none",
    chat: bool | None = None,
    trace: bool = False,
    repetitions: Sequence[int] | None = None,
    config: GenerationConfig | None = None,
    **arguments: Unpack[GenerationArguments],
) -> Iterator[tuple[int, Result]]:
    """Like `generate` for many prompts: yields (index of the prompt, result) as each is finished.

    The iterator may be closed early: what still ran is dropped.
    """
    loaded = load(model)
    how = Preparation.of(loaded, sampler, cache, config, arguments)
    return _each(how.scheduler(how.prompts(list(prompts), chat, repetitions, 1, trace)))


def stream(
    model: ModelLike,
    prompt: Any,
    *,
    sampler: SamplerLike = "threshold",
    cache: CacheLike = "none",
    chat: bool | None = None,
    trace: bool = False,
    config: GenerationConfig | None = None,
    **arguments: Unpack[GenerationArguments],
) -> Iterator[Event]:
    """Like `generate`, step by step: yields an `Event` per row and step; the last one of a row
    carries its result."""
    loaded = load(model)
    prompts = list(prompt) if is_batch(prompt) else [prompt]
    how = Preparation.of(loaded, sampler, cache, config, arguments)
    return _events(how.scheduler(how.prompts(prompts, chat, None, 1, trace)))


def infill(
    model: ModelLike,
    text: str | Sequence[int],
    *,
    prompt: Any = None,
    sampler: SamplerLike = "threshold",
    cache: CacheLike = "none",
    trace: bool = False,
    config: GenerationConfig | None = None,
    **arguments: Unpack[GenerationArguments],
) -> Result:
    """Fill holes in a fixed text: ``"def area(r):\\n    return [[8]]\\n"`` has one of 8 tokens.

    ``text``: a string with ``[[n]]`` holes, or token ids in which -1 marks a position to fill.
    With a ``prompt`` (as for `generate`) it is the form of the answer: ``"The answer is [[2]]."``.
    Stop ids are never proposed, so that a sampler's end-of-text rule has nothing to do; the text
    around the holes stays as it is.  The result's ``text`` is the whole text, ``tokens`` all of its
    ids.
    """
    loaded = load(model)
    how = Preparation.of(loaded, sampler, cache, config, arguments, holes=True)
    return _completed(how.scheduler([how.text(*encode_holes(loaded, text), prompt, trace)]), how)[0]


def _completed(
    scheduler: Scheduler, how: Preparation, progress: bool = False, feed: Feed | None = None
) -> list[Result]:
    """All results, in the order of the requests; the first error is raised."""
    requests = list(scheduler.waiting)
    bar = _Bar(how, requests) if progress else nullcontext()
    with closing(scheduler), bar as shown:
        while scheduler.busy:
            happened = scheduler.advance()
            for request, _ in happened:
                if request.error is not None:
                    raise request.error
            if feed is not None:
                for _, event in events(happened, scheduler.model.facts.stop_token_ids):
                    feed.take(event)
            if shown is not None:
                shown.update()
    return [request.result for request in requests if request.result is not None]


def _each(scheduler: Scheduler) -> Iterator[tuple[int, Result]]:
    with closing(scheduler):
        while scheduler.busy:
            for request, _ in scheduler.advance():
                if request.error is not None:
                    raise request.error
                if request.result is not None:
                    yield request.index, request.result


def _events(scheduler: Scheduler) -> Iterator[Event]:
    readers: dict[int, Reader] = {}
    with closing(scheduler):
        while scheduler.busy:
            progress = scheduler.advance()
            for request, _ in progress:
                if request.error is not None:
                    raise request.error
            for request, event in events(progress, scheduler.model.facts.stop_token_ids):
                reader = readers.get(request.index)
                if reader is None:
                    reader = readers[request.index] = Reader(scheduler.model, request.recipe)
                if event.result is not None:
                    del readers[request.index]
                yield reader.read(event)


class _Bar:
    """A bar of decided tokens and finished texts on stderr."""

    def __init__(self, how: Preparation, requests: list[Request]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = ("{task.description}", BarColumn(), "{task.completed}/{task.total} tokens",
                   TextColumn("{task.fields[rows]}"), TextColumn("{task.fields[rate]}"),
                   TimeRemainingColumn())  # fmt: skip
        self.requests = requests
        self.progress = Progress(*columns, console=Console(stderr=True))
        total = sum(request.size for request in requests)
        self.task = self.progress.add_task(how.sampler.spec, total=total, rows="", rate="")

    def __enter__(self) -> _Bar:
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
