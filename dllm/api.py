"""What users call: generate, stream, as_completed, infill."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, Unpack, cast, overload

from .cache.base import CacheLike, compose
from .core.config import GenerationArguments, GenerationConfig
from .core.errors import ConfigError, PromptError, short
from .models import DiffusionModel
from .models.loader import remembered
from .request.prompts import ManyPrompts, OnePrompt, is_batch
from .request.request import Request
from .request.requests import engine_for, infill_request, recipe_for, requests_for
from .runtime.events import Event
from .runtime.result import Result
from .runtime.scheduler import Scheduler
from .runtime.streamers import Streamer, feeding
from .samplers.compose import SamplerLike

DEFAULTS: dict[str, Any] = {"sampler": None, "cache": "none", "config": None, "trace": False}
ModelLike = Any  # DiffusionModel, PreTrainedModel, hub id, folder or bundled name


class FillOptions(GenerationArguments, total=False):
    """What every call takes: a sampler, a cache, and the fields of a `GenerationConfig`."""

    sampler: SamplerLike | None
    cache: CacheLike
    trace: bool
    config: GenerationConfig | None


class CallOptions(FillOptions, total=False):
    """What calls with prompts take beside."""

    chat: bool | None


class GenerateOptions(CallOptions, total=False):
    """What `generate` takes beside."""

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
    sampler: SamplerLike | None = None,
    cache: CacheLike = "none",
    chat: bool | None = None,
    n: int = 1,
    trace: bool = False,
    streamer: Streamer | None = None,
    repetitions: Sequence[int] | None = None,
    config: GenerationConfig | None = None,
    **arguments: Unpack[GenerationArguments],
) -> Any:
    """Write an answer to ``prompt``, or to each of several prompts.

    ``model``: what `dllm.load` returns, or anything it takes; the last two that were given by name
    stay in memory.  ``prompt``: a string, chat messages
    (``[{"role": "user", "content": ...}]``) or token ids; a list of these is a batch, whose rows
    may differ in length and come out as if each had run alone.  At most ``max_batch_size`` of them
    are decoded at a time; when one is finished, the next joins.  ``sampler``, ``cache``: names
    such as ``"threshold(tau=0.8)"`` and ``"dual"``, or objects (default: the model's own sampler,
    "threshold" for most, and no cache); see `dllm.samplers.available` and
    `dllm.cache.available`.  ``chat``: whether a string goes through the chat template (default:
    when there is one).  ``n``: answers per prompt, each with noise of its own; at temperature 0
    they differ only where the sampler draws, as ``"llada(remasking=random)"`` does.  ``trace``
    keeps every step in ``result.trace``; ``streamer`` (one prompt only) receives what is final as
    it is decided, and drafts where it has ``put_draft``.  ``repetitions``: per prompt how many
    times it was answered before, so that a new answer draws new noise; by default equal prompts of
    a batch are counted, from 0.  ``config``: a `dllm.GenerationConfig` in place of the
    checkpoint's defaults; ``arguments``: single fields of it.

    Returns a `Result`, or a list of them for a list of prompts; with ``n`` > 1 a list of ``n`` in
    place of each.  Raises `dllm.DllmError` with one sentence that says what to do.
    """
    with nullcontext() if streamer is None else feeding(streamer) as take:
        batch = is_batch(prompt)
        prompts = list(prompt) if batch else [prompt]
        loaded = remembered(model)
        recipe = recipe_for(loaded, sampler, config, arguments)
        requests = requests_for(loaded, recipe, prompts, chat, repetitions, n, trace)
        if take is not None and len(requests) > 1:
            raise ConfigError("a streamer follows one answer: pass prompts one by one")
        results = _scheduler(loaded, cache, requests).completed(take)
    grouped = [results[i : i + n] for i in range(0, len(results), n)] if n > 1 else results
    return grouped if batch else grouped[0]


def as_completed(
    model: ModelLike, prompts: Iterable[Any], *, repetitions: Sequence[int] | None = None,
    **options: Unpack[CallOptions],
) -> Iterator[tuple[int, Result]]:  # fmt: skip
    """Like `generate` for many prompts: yields (index of the prompt, result) as each is finished.

    A list is checked as a whole first.  From an iterator prompts are taken as rows become free, so
    that answers come before it ends.  Closing what is returned drops what still runs.
    """
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise PromptError(f"pass a list or an iterator of prompts, not {short(prompts)}")
    if isinstance(prompts, Sequence) or repetitions is not None:
        return _answering(model, list(prompts), options, repetitions).each()
    return _arriving(model, prompts, options)


def stream(model: ModelLike, prompt: Any, **options: Unpack[CallOptions]) -> Iterator[Event]:
    """Like `generate`, step by step: an `Event` per row and step, a row's last with its result."""
    return _answering(model, list(prompt) if is_batch(prompt) else [prompt], options).events()


def infill(
    model: ModelLike, text: str | Sequence[int], *, prompt: Any = None,
    **options: Unpack[FillOptions],
) -> Result:  # fmt: skip
    """Fill holes in a fixed text: ``"def area(r):\\n    return [[8]]\\n"`` has one of 8 tokens.

    ``text``: a string with ``[[n]]`` holes, or token ids with -1 or the mask's id at each position
    to fill.  A hole ``[[4..32]]`` has some length between, ``[[*]]`` one up to 64; which, is
    measured first (``length="sure"``, the default), see `dllm.request.holes`.
    ``[[8:[a-z]+]]`` is a hole with a regular expression: its 8 tokens spell a text that matches
    ``[a-z]+``.
    With a ``prompt`` (as for `generate`) the text is the answer: ``"The answer is [[2]]."``.
    Stop ids are never proposed, so that a sampler's end-of-text rule has nothing to do; the text
    around the holes stays as it is, unless one of the ``stop_strings`` ends the last hole, and with
    it the text.  The result's ``text`` is the whole text, ``tokens`` all of its ids.
    """
    given: dict[str, Any] = {**DEFAULTS, **options}
    sampler, cache, config, trace = map(given.pop, DEFAULTS)
    loaded = remembered(model)
    recipe = recipe_for(loaded, sampler, config, given, holes=True)
    request = infill_request(loaded, recipe, text, prompt, trace)
    return cast(Result, _scheduler(loaded, cache, [request]).completed()[0])


def _answering(
    model: ModelLike, prompts: list[Any], options: Mapping[str, Any],
    repetitions: Sequence[int] | None = None,
) -> Scheduler:  # fmt: skip
    given = {**DEFAULTS, **options}
    sampler, cache, config, trace = map(given.pop, DEFAULTS)
    chat, loaded = given.pop("chat", None), remembered(model)
    recipe = recipe_for(loaded, sampler, config, given)
    requests = requests_for(loaded, recipe, prompts, chat, repetitions, trace=trace)
    return _scheduler(loaded, cache, requests)


def _arriving(
    model: ModelLike, prompts: Iterable[Any], options: Mapping[str, Any]
) -> Iterator[tuple[int, Result]]:
    given = {**DEFAULTS, **options}
    sampler, cache, config, trace = map(given.pop, DEFAULTS)
    chat, loaded, seen = given.pop("chat", None), remembered(model), Counter[Any]()
    recipe = recipe_for(loaded, sampler, config, given)

    def requests() -> Iterator[Request]:
        for index, prompt in enumerate(prompts):
            (request,) = requests_for(loaded, recipe, [prompt], chat, trace=trace, seen=seen)
            request.index = index
            yield request

    arriving = requests()
    for first in arriving:
        engine = engine_for(loaded, compose(cache, loaded.family.name), [first], grows=True)
        yield from Scheduler.of(engine, [first]).each(arriving)


def _scheduler(model: DiffusionModel, cache: CacheLike, requests: Sequence[Request]) -> Scheduler:
    """The requests, which have one recipe, in the queue of an engine of their own."""
    return Scheduler.of(engine_for(model, compose(cache, model.family.name), requests), requests)
