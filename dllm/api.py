"""What users call: generate, stream, infill."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from . import cache as caches
from . import samplers
from .cache.base import CacheLike
from .call import Call, Event, stop_strings
from .canvas import Canvas, IntArray
from .config import GenerationConfig
from .engine.loop import Engine, Step
from .errors import ConfigError, PromptError
from .kernels.noise import uniform
from .models import DiffusionModel, load
from .prompts import encode, encode_continuation, encode_text, is_batch
from .result import Result
from .samplers import Sampler
from .samplers.compose import SamplerLike

DEFAULT_LENGTH = 128  # new tokens, where neither the call nor the checkpoint says how many
HOLE = re.compile(r"\[\[(\d+)\]\]")

ModelLike = Any  # DiffusionModel, PreTrainedModel, hub id, folder or bundled name


class Streamer(Protocol):
    """transformers' ``TextDiffusionStreamer`` and whatever looks like it."""

    def put(self, value: torch.Tensor) -> None: ...
    def put_draft(self, value: torch.Tensor, **kwargs: Any) -> None: ...
    def end(self) -> None: ...


def generate(
    model: ModelLike,
    prompt: Any,
    *,
    sampler: SamplerLike = "threshold",
    cache: CacheLike = "none",
    chat: bool | None = None,
    trace: bool = False,
    progress: bool = False,
    streamer: Streamer | None = None,
    repetitions: Sequence[int] | None = None,
    **arguments: Any,
) -> Any:
    """Write an answer to ``prompt``, or to each of several prompts.

    ``model``: what `dllm.load` returns, or anything it takes.  ``prompt``: a string, chat messages
    (``[{"role": "user", "content": ...}]``) or token ids; a list of these is a batch, whose rows
    may differ in length and come out as if each had run alone.  ``sampler``, ``cache``: names such
    as ``"threshold(tau=0.8)"`` and ``"dual"``, or objects; see `dllm.samplers.available` and
    `dllm.cache.available`.  ``chat``: whether a string goes through the chat template (default:
    when there is one).  ``trace`` keeps every step in ``result.trace``; ``progress`` shows a bar
    on stderr; ``streamer`` (one prompt only) receives text as it is decided.  ``repetitions``: per
    prompt how many times it was answered before, so that a new answer draws new noise; by default
    equal prompts of a batch are counted, from 0.  ``arguments``: see `dllm.GenerationConfig`.

    Returns a `Result`, or a list of them for a list of prompts.  Raises `dllm.DllmError` with one
    sentence that says what to do.
    """
    loaded = load(model)
    prompts = list(prompt) if is_batch(prompt) else [prompt]
    if streamer is not None and len(prompts) > 1:
        raise ConfigError("a streamer follows one prompt: pass prompts one by one")
    call = _prepare(loaded, prompts, chat, sampler, cache, trace, arguments, repetitions)
    for steps in _with_progress(call, progress):
        if streamer is not None:
            _feed(streamer, steps[0])
    if streamer is not None:
        streamer.end()
    results = [call.result(i) for i in range(len(prompts))]
    return results if is_batch(prompt) else results[0]


def stream(
    model: ModelLike,
    prompt: Any,
    *,
    sampler: SamplerLike = "threshold",
    cache: CacheLike = "none",
    chat: bool | None = None,
    trace: bool = False,
    **arguments: Any,
) -> Iterator[Event]:
    """Like `generate`, step by step: yields an `Event` per row and step."""
    loaded = load(model)
    prompts = list(prompt) if is_batch(prompt) else [prompt]
    return _prepare(loaded, prompts, chat, sampler, cache, trace, arguments).events()


def infill(
    model: ModelLike,
    text: str | Sequence[int],
    *,
    prompt: Any = None,
    sampler: SamplerLike = "threshold",
    cache: CacheLike = "none",
    trace: bool = False,
    **arguments: Any,
) -> Result:
    """Fill holes in a fixed text: ``"def area(r):\\n    return [[8]]\\n"`` has one of 8 tokens.

    ``text``: a string with ``[[n]]`` holes, or token ids in which -1 marks a position to fill.
    With a ``prompt`` (as for `generate`) it is the form of the answer: ``"The answer is [[2]]."``.
    Stop ids are never proposed, so that a sampler's end-of-text rule has nothing to do; the text
    around the holes stays as it is.  The result's ``text`` is the whole text, ``tokens`` all of its
    ids.
    """
    loaded = load(model)
    fixed = {"max_new_tokens", "min_new_tokens", "eos_policy"} & set(arguments)
    if fixed:
        raise ConfigError(f"infill writes what the holes ask for: drop {sorted(fixed)[0]}")
    before = np.zeros(0, np.int64) if prompt is None else encode(loaded, prompt)
    ids, holes = _holes(loaded, text)
    count = int(holes.sum())
    if len(before) + len(ids) > loaded.facts.context_length:
        raise PromptError(
            f"{len(before) + len(ids)} tokens exceed the context of "
            f"{loaded.facts.context_length}: shorten the text or its holes"
        )
    defaults = {k: v for k, v in loaded.generation_defaults.items() if k != "max_new_tokens"}
    own = {"max_new_tokens": count, "eos_policy": "none"}
    config = GenerationConfig.build(defaults, {**arguments, **own})
    canvas = Canvas.for_infill(
        np.concatenate([before, ids]), np.concatenate([before < 0, holes]), len(before),
        **_canvas_facts(loaded, config),
    )  # fmt: skip
    composed = _compose(loaded, sampler, config, arguments)
    call = _call(loaded, composed, cache, config, ban_stops=True)
    call.start([canvas], trace)
    for _ in call.run():
        pass
    return call.result(0)


def _prepare(
    model: DiffusionModel,
    prompts: list[Any],
    chat: bool | None,
    sampler: SamplerLike,
    cache: CacheLike,
    trace: bool,
    arguments: dict[str, Any],
    repetitions: Sequence[int] | None = None,
) -> Call:
    """Everything that can be wrong is found here, before the first step: names first."""
    config = GenerationConfig.build(model.generation_defaults, arguments)
    call = _call(model, _compose(model, sampler, config, arguments), cache, config)
    call.start(_canvases(model, prompts, chat, config, repetitions), trace)
    return call


def _compose(
    model: DiffusionModel,
    sampler: SamplerLike,
    config: GenerationConfig,
    given: Mapping[str, Any],
) -> Sampler:
    """The sampler for this model.  What the call gives must be of use to some part; what the
    checkpoint recommends need not."""
    options = {key: value for key, value in config.sampler_options.items() if key in given}
    facts = {**config.sampler_options, "delimiters": model.delimiters}
    return samplers.compose(
        sampler, options=options, stop_ids=model.facts.stop_token_ids,
        family=model.family.name, facts=facts,
    )  # fmt: skip


def _call(
    model: DiffusionModel,
    sampler: Sampler,
    cache: CacheLike,
    config: GenerationConfig,
    ban_stops: bool = False,
) -> Call:
    watch = stop_strings(model, config) if config.stop_strings else None
    engine = Engine(
        model, sampler, caches.compose(cache, model.family.name), config, watch, ban_stops
    )
    return Call(model, config, engine)


def _canvases(
    model: DiffusionModel,
    prompts: list[Any],
    chat: bool | None,
    config: GenerationConfig,
    repetitions: Sequence[int] | None,
) -> list[Canvas]:
    """One canvas per prompt, with noise of its own for each repetition of one."""
    if not prompts:
        raise PromptError("there is no prompt: pass a string, messages, ids, or a list of them")
    encoded = [encode(model, prompt, chat) for prompt in prompts]
    if repetitions is None:
        repetitions = occurrences([ids.tobytes() for ids in encoded])
    if len(repetitions) != len(prompts):
        raise ConfigError(
            f"{len(prompts)} prompts have as many repetitions, not {len(repetitions)}"
        )
    canvases, facts = [], _canvas_facts(model, config)
    for ids, row in zip(encoded, repetitions, strict=True):
        length = _canvas_length(model, len(ids), config)
        canvas = Canvas.for_prompt(ids, length, row=row, **facts)
        for offset, wanted in config.constraints.items():
            _constrain(model, canvas, offset, wanted)
        canvases.append(canvas)
    return canvases


def occurrences(items: Sequence[Hashable]) -> list[int]:
    """For each item how often it stands before."""
    seen: Counter[Hashable] = Counter()
    result = []
    for item in items:
        result.append(seen[item])
        seen[item] += 1
    return result


def _constrain(model: DiffusionModel, canvas: Canvas, offset: int, wanted: int | str) -> None:
    """Fix the answer's tokens from ``offset`` on."""
    if isinstance(wanted, int):
        ids = [wanted]
    elif model.tokenizer is None:
        raise PromptError(f"{model.name} came without a tokenizer: constrain to token ids")
    else:
        ids = encode_continuation(model.tokenizer, wanted)
    if canvas.start + offset + len(ids) > canvas.end:
        raise ConfigError(
            f"the constraint {wanted!r} at offset {offset} does not fit an answer of "
            f"{canvas.end - canvas.start} tokens: raise max_new_tokens"
        )
    if not all(0 <= token < model.facts.vocab_size for token in ids):
        raise ConfigError(
            f"the constraint {wanted!r} is no id of the vocabulary of {model.facts.vocab_size}"
        )
    canvas.give(canvas.start + offset, np.asarray(ids, np.int64))


def _canvas_facts(model: DiffusionModel, config: GenerationConfig) -> dict[str, Any]:
    facts = model.facts
    mask = -1 if facts.mask_token_id is None else facts.mask_token_id
    pad = facts.pad_token_id if facts.pad_token_id is not None else facts.eos_token_id
    return {
        "mask_id": mask,
        "pad_id": mask if pad is None else pad,
        "noise": lambda stream, step, at: uniform(config.seed, stream, at, step, 0),
    }


def _canvas_length(model: DiffusionModel, prompt: int, config: GenerationConfig) -> int:
    """How many positions to write after ``prompt`` tokens, within the context."""
    limit, wanted = model.facts.context_length, config.max_new_tokens
    if prompt >= limit:
        raise PromptError(
            f"the prompt has {prompt} tokens, the context {limit}: shorten it by at least "
            f"{prompt - limit + 1}"
        )
    if wanted is None:
        return max(config.min_new_tokens, min(DEFAULT_LENGTH, limit - prompt))
    if prompt + wanted > limit:
        raise PromptError(
            f"{prompt} prompt tokens and {wanted} new ones exceed the context of {limit}: "
            f"shorten the prompt or pass max_new_tokens={limit - prompt}"
        )
    return wanted


def _holes(model: DiffusionModel, text: str | Sequence[int]) -> tuple[IntArray, Any]:
    """Ids with anything at the holes, and where the holes are."""
    if isinstance(text, str):
        if model.tokenizer is None:
            raise PromptError(f"{model.name} came without a tokenizer: pass ids with -1 for holes")
        ids: list[int] = []
        for i, piece in enumerate(HOLE.split(text)):
            if i % 2:
                ids += [-1] * int(piece)
            elif piece:
                encode_piece = encode_continuation if ids else encode_text
                ids += encode_piece(model.tokenizer, piece)
    else:
        ids = [int(i) for i in text]
    array = np.asarray(ids, np.int64)
    if not (array == -1).any():
        raise PromptError("there is no hole to fill: mark one as [[8]] (tokens), or -1 among ids")
    return np.maximum(array, 0), array == -1


def _with_progress(call: Call, show: bool) -> Iterator[list[Step]]:
    """The steps, with a bar of decided positions on stderr when asked for."""
    if not show:
        yield from call.run()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    total = sum(int(canvas.masked.sum()) for canvas in call.canvases)
    columns = ("{task.description}", BarColumn(), "{task.completed}/{task.total} tokens",
               TextColumn("{task.fields[rate]}"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(call.engine.sampler.spec, total=total, rate="")
        for steps in call.run():
            left = sum(int(canvas.masked.sum()) for canvas in call.canvases)
            rate = (total - left) / max(1, sum(canvas.nfe for canvas in call.canvases))
            bar.update(task, completed=total - left, rate=f"{rate:.2f} tokens per forward")
            yield steps


def _feed(streamer: Streamer, step: Step) -> None:
    """Hand a streamer what became final, then the rest of the window as a draft."""
    canvas, p = step.canvas, step.prediction
    told: int = canvas.memory.setdefault("streamed", 0)
    if not told:
        streamer.put(torch.from_numpy(canvas.tokens[: canvas.prompt_length]))
        told = canvas.start
    end = canvas.end if canvas.stop_position is None else canvas.stop_position + 1
    undecided = canvas.masked[told:end]
    frontier = told + int(undecided.argmax()) if undecided.any() else end
    if frontier > told:
        streamer.put(torch.from_numpy(canvas.tokens[told:frontier]))
    canvas.memory["streamed"] = frontier
    if not canvas.finished:
        draft = canvas.tokens.copy()
        draft[p.positions] = np.where(canvas.masked[p.positions], p.token, draft[p.positions])
        streamer.put_draft(torch.from_numpy(draft[frontier : canvas.window[1]]))
