"""From what users pass to requests: everything that can be wrong is found here, before any step."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from . import cache as caches
from . import samplers
from .cache import Cache
from .cache.base import CacheLike
from .canvas import BoolArray, Canvas, IntArray
from .config import GenerationConfig
from .engine import Engine, Recipe
from .engine.recipe import check_recipe
from .errors import ConfigError, PromptError
from .kernels.noise import uniform
from .models import DiffusionModel
from .prompts import encode, encode_continuation, encode_text
from .samplers import Sampler
from .samplers.compose import SamplerLike
from .scheduler import Request, Scheduler

HOLE = re.compile(r"\[\[(\d+)\]\]")
DEFAULT_LENGTH = 128  # new tokens, where neither the call nor the checkpoint says how many


@dataclass(frozen=True, eq=False)
class Preparation:
    """A sampler, a cache and arguments that go together on a model."""

    model: DiffusionModel
    cache: Cache
    recipe: Recipe

    @property
    def sampler(self) -> Sampler:
        return self.recipe.sampler

    @property
    def config(self) -> GenerationConfig:
        return self.recipe.config

    @classmethod
    def of(
        cls,
        model: DiffusionModel,
        sampler: SamplerLike,
        cache: CacheLike,
        config: GenerationConfig | None,
        arguments: Mapping[str, Any],
        holes: bool = False,
    ) -> Preparation:
        """Names first, then how they go together.  ``holes``: for a text with holes, which is as
        long as it is, and in which nothing ends."""
        given = dict(arguments)
        if config is not None:
            plain = GenerationConfig()
            own = {k: v for k, v in vars(config).items() if v != getattr(plain, k)}
            given = {**own, **given}
        defaults = dict(model.generation_defaults) if config is None else {}
        if holes:
            fixed = {"max_new_tokens", "min_new_tokens", "eos_policy"} & set(given)
            if fixed:
                raise ConfigError(f"infill writes what the holes ask for: drop {sorted(fixed)[0]}")
            defaults = {**defaults, "max_new_tokens": None, "eos_policy": "none"}
        built = GenerationConfig.build(defaults, given)
        composed = _compose(model, sampler, built, given)
        watch = stop_strings(model, built) if built.stop_strings else None
        recipe = Recipe(composed, built, ban_stops=holes, after_step=watch)
        chosen = caches.compose(cache, model.family.name)
        check_recipe(recipe, chosen, model)
        return cls(model, chosen, recipe)

    def prompts(
        self,
        prompts: Sequence[Any],
        chat: bool | None = None,
        repetitions: Sequence[int] | None = None,
        n: int = 1,
        traced: bool = False,
    ) -> list[Request]:
        """``n`` requests per prompt, each with noise of its own; their canvases are made when they
        are admitted."""
        if not prompts:
            raise PromptError("there is no prompt: pass a string, messages, ids, or a list of them")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigError(f"n must be a whole number of at least 1, not {n!r}")
        encoded = [encode(self.model, prompt, chat) for prompt in prompts]
        if repetitions is None:
            repetitions = [n * i for i in occurrences([ids.tobytes() for ids in encoded])]
        if len(repetitions) != len(prompts):
            raise ConfigError(
                f"{len(prompts)} prompts have as many repetitions, not {len(repetitions)}"
            )
        requests: list[Request] = []
        given = [
            (offset, _constraint(self.model, wanted))
            for offset, wanted in self.config.constraints.items()
        ]
        for ids, first in zip(encoded, repetitions, strict=True):
            length = canvas_length(self.model, len(ids), self.config)
            for offset, tokens in given:
                _check_constraint(offset, tokens, length)
            for i in range(n):
                make = partial(self._canvas, ids, length, first + i, given)
                requests.append(
                    Request(len(requests), make, self.recipe, len(ids) + length, length, traced)
                )
        return requests

    def text(
        self, ids: IntArray, holes: BoolArray, prompt: Any = None, traced: bool = False,
        repetition: int = 0,
    ) -> Request:  # fmt: skip
        """A request that fills the ``holes`` (L,) bool of ``ids`` (L,), behind a prompt."""
        before = np.zeros(0, np.int64) if prompt is None else encode(self.model, prompt)
        total, limit = len(before) + len(ids), self.model.facts.context_length
        if total > limit:
            raise PromptError(
                f"{total} tokens exceed the context of {limit}: shorten the text or its holes"
            )
        tokens = np.concatenate([before, ids])
        masked = np.concatenate([np.zeros(len(before), np.bool_), holes])
        make = partial(
            Canvas.for_infill, tokens, masked, len(before), row=repetition,
            **_facts(self.model, self.config),
        )  # fmt: skip
        return Request(0, make, self.recipe, total, int(holes.sum()), traced)

    def scheduler(self, requests: Sequence[Request]) -> Scheduler:
        """An engine that holds the ``max_rows`` largest requests, and all of them in its queue."""
        config = self.config
        sizes = sorted((request.positions for request in requests), reverse=True)
        lanes = self.recipe.lanes * self.recipe.width
        engine = Engine(
            self.model, self.cache, slots=lanes * sum(sizes[: config.max_rows]),
            max_rows=config.max_rows, max_batch_tokens=config.max_batch_tokens,
            cuda_graphs=config.cuda_graphs, compile=config.compile,
        )  # fmt: skip
        scheduler = Scheduler(self.model, engine)
        for request in requests:
            scheduler.add(request)
        return scheduler

    def _canvas(
        self, ids: IntArray, length: int, repetition: int, given: list[tuple[int, IntArray]]
    ) -> Canvas:
        facts = _facts(self.model, self.config)
        canvas = Canvas.for_prompt(ids, length, row=repetition, **facts)
        for offset, tokens in given:
            canvas.give(canvas.start + offset, tokens)
        return canvas


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


def occurrences(items: Sequence[Hashable]) -> list[int]:
    """For each item how often it stands before."""
    seen: Counter[Hashable] = Counter()
    counts = []
    for item in items:
        counts.append(seen[item])
        seen[item] += 1
    return counts


def _constraint(model: DiffusionModel, wanted: int | str) -> IntArray:
    """The ids that a constraint fixes."""
    if isinstance(wanted, int):
        ids = [wanted]
    elif model.tokenizer is None:
        raise PromptError(f"{model.name} came without a tokenizer: constrain to token ids")
    else:
        ids = encode_continuation(model.tokenizer, wanted)
    if not all(0 <= token < model.facts.vocab_size for token in ids):
        raise ConfigError(
            f"the constraint {wanted!r} is no id of the vocabulary of {model.facts.vocab_size}"
        )
    return np.asarray(ids, np.int64)


def _check_constraint(offset: int, tokens: IntArray, length: int) -> None:
    if offset + len(tokens) > length:
        raise ConfigError(
            f"the constraint of {len(tokens)} tokens at offset {offset} does not fit an answer of "
            f"{length} tokens: raise max_new_tokens"
        )


def _facts(model: DiffusionModel, config: GenerationConfig) -> dict[str, Any]:
    """What every canvas of a model is made with."""
    facts = model.facts
    mask = -1 if facts.mask_token_id is None else facts.mask_token_id
    pad = facts.pad_token_id if facts.pad_token_id is not None else facts.eos_token_id
    return {
        "mask_id": mask,
        "pad_id": mask if pad is None else pad,
        "noise": lambda stream, step, at: uniform(config.seed, stream, at, step, 0),
    }


def canvas_length(model: DiffusionModel, prompt: int, config: GenerationConfig) -> int:
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


def holes_of(model: DiffusionModel, text: str | Sequence[int]) -> tuple[IntArray, BoolArray]:
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


@dataclass(slots=True)
class StopSearch:
    """What the search for stop strings remembers of a row: how far it has looked."""

    frontier: int | None = None


def stop_strings(model: DiffusionModel, config: GenerationConfig) -> Callable[[Canvas], None]:
    """After a step: finish a row whose decided beginning contains a stop string."""
    if model.tokenizer is None:
        raise ConfigError(f"{model.name} came without a tokenizer: it has no stop_strings")
    tokenizer = model.tokenizer

    def decode(tokens: IntArray) -> str:
        return str(tokenizer.decode(tokens.tolist()))

    def check(canvas: Canvas) -> None:
        undecided = canvas.masked[canvas.start : canvas.end]
        frontier = int(undecided.argmax()) if undecided.any() else len(undecided)
        search = canvas.state(StopSearch)
        if frontier == search.frontier:
            return
        search.frontier = frontier
        tokens = canvas.tokens[canvas.start : canvas.start + frontier]
        text = decode(tokens)
        if any(stop in text for stop in config.stop_strings):
            last = _shortest_with(decode, tokens, config.stop_strings)
            canvas.stop_position = canvas.start + last
            canvas.cut(canvas.stop_position)
            canvas.finish("stop")

    return check


def _shortest_with(
    decode: Callable[[IntArray], str], tokens: IntArray, stops: Sequence[str]
) -> int:
    """Index of the token that completes the first stop string."""
    low, high = 0, len(tokens) - 1
    while low < high:
        middle = (low + high) // 2
        if any(stop in decode(tokens[: middle + 1]) for stop in stops):
            high = middle
        else:
            low = middle + 1
    return low
