"""From prompts to requests, for both kinds of model: what a maker of requests checks and makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..core.canvas import Canvas, IntArray
from ..core.config import GenerationConfig
from ..core.errors import ConfigError, PromptError, check_switch, short
from ..engine.work import Work
from ..models import DiffusionModel
from ..samplers import NOTHING
from ..samplers.compose import SamplerLike
from .canvases import canvas_facts, canvas_length, check_apart, check_constraint, fixed_ids
from .prompts import check_lengths_alone, encode, encode_open, is_batch
from .request import Request

ORDERED = ("sampler", "chat", "trace", "repetition", "config")


@dataclass(frozen=True, eq=False)
class RequestMaker:
    """Makes requests of prompts, all with one ``recipe``.  ``given``: the arguments that the caller
    named, which must not be without effect."""

    model: DiffusionModel
    recipe: Any
    given: frozenset[str] = frozenset()

    @property
    def config(self) -> GenerationConfig:
        config: GenerationConfig = self.recipe.config
        return config

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return self.model.facts.stop_token_ids

    def engine(
        self,
        most: int | None,
        max_batch_size: int,
        max_batch_tokens: int | None,
        whole: bool = False,
    ) -> Work[Any, Any]:
        """What decodes the requests, see `Work`; ``whole``: with all its memory from the start."""
        raise NotImplementedError

    def request(self, order: Order) -> Request:
        """What ``order`` describes, with what is here where it says nothing; raises what is wrong
        with it."""
        raise NotImplementedError

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
        if not isinstance(chat, bool | None):
            raise ConfigError(f"chat is True, False or None, not {short(chat)}")
        check_switch("trace", traced)
        encoded = [encode(self.model, prompt, chat) for prompt in prompts]
        if repetitions is None:
            repetitions = [n * i for i in occurrences([ids.tobytes() for ids in encoded])]
        _check_repetitions(repetitions, len(prompts))
        drafts = self._drafts(len(prompts))
        caps = [self.cap(len(ids), draft) for ids, draft in zip(encoded, drafts, strict=True)]
        self._check_used(max(caps), traced)
        requests: list[Request] = []
        given = [
            (offset, fixed_ids(self.model, wanted))
            for offset, wanted in self.config.constraints.items()
        ]
        fixed = check_apart(given)
        for ids, draft, cap, first in zip(encoded, drafts, caps, repetitions, strict=True):
            for offset, tokens in given:
                check_constraint(offset, tokens, cap)
            begun = len(draft)
            length = begun + self.first_length(len(ids), begun, cap - begun)
            length = max(length, fixed)
            if self.recipe.format is not None:
                self._check_room(self._canvas(ids, draft, length, cap, given, 0))
            for i in range(n):
                make = partial(self._canvas, ids, draft, length, cap, given, first + i)
                requests.append(
                    self._request(len(requests), make, len(ids) + length, length, traced)
                )
        return requests

    @property
    def grows(self) -> bool:
        """Whether answers find their length."""
        return False

    def _drafts(self, count: int) -> list[IntArray]:
        """What each of so many answers begins as, -1 where it is open."""
        seed = self.config.initial_text
        if seed is None:
            return [NOTHING] * count
        each = list(seed) if is_batch(seed) else [seed] * count
        if len(each) != count:
            raise ConfigError(f"{count} prompts have one draft, or as many, not {len(each)}")
        for one in each:
            check_lengths_alone(one, "a draft")
        drafts = [encode_open(self.model, one, "a draft", continued=True) for one in each]
        for draft in drafts:
            for low, high in self.config.remask:
                if high > len(draft):
                    raise ConfigError(
                        f"remask names position {high - 1} of a draft of {len(draft)} tokens"
                    )
                draft[low:high] = -1
        return drafts

    def cap(self, prompt: int, draft: IntArray = NOTHING) -> int:
        """Most positions of the answer to a prompt of so many tokens, which begins as ``draft``."""
        given = "max_new_tokens" in self.given
        if (draft < 0).any() and not given:
            return canvas_length(self.model, prompt, self.config.but(max_new_tokens=len(draft)))
        cap = canvas_length(self.model, prompt, self.config, given)
        if len(draft) > cap:
            raise ConfigError(
                f"the draft has {len(draft)} tokens, the answer at most {cap}: raise max_new_tokens"
            )
        return cap

    def first_length(self, prompt: int, begun: int, cap: int) -> int:
        """Positions behind the ``begun`` ones of a draft when the row begins."""
        return cap

    def _request(
        self, index: int, make: Callable[[], Canvas], positions: int, size: int, traced: bool
    ) -> Request:
        return Request(index, make, self.recipe, positions, size, self.stop_ids, traced)

    def _check_room(self, canvas: Canvas) -> None:
        """Refuse a canvas in which no text of the format can be written."""
        form, name = self.recipe.format, self.config.formatted
        if form is None or form.fits(canvas):
            return
        room, least = int(canvas.masked.sum()), form.least()
        if room == canvas.end - canvas.start and least > room:
            raise ConfigError(
                f"a text of this {name} has at least {least} tokens, max_new_tokens is {room}: "
                "raise it"
            )
        raise ConfigError(
            f"no text of this {name or 'form'} fits the {room} open positions and what stands "
            "around them"
        )

    def _check_used(self, canvas: int, traced: bool) -> None:
        """Refuse what the caller named and what would change nothing."""
        size = self.model.facts.vocab_size
        for token in self.config.logit_bias:
            if token >= size:
                raise ConfigError(
                    f"logit_bias: token id {token} is outside the vocabulary of {size}"
                )
        self.config.check_used(
            self.given, canvas=canvas, tempered=self.model.facts.score_source == "tempered",
            traced=traced,
        )  # fmt: skip

    def engine_for(self, requests: Sequence[Request]) -> Work[Any, Any]:
        """An engine that holds the ``max_batch_size`` largest requests."""
        config, lanes = self.config, self.recipe.owned
        sizes = sorted((request.positions for request in requests), reverse=True)
        most = None if self.grows else lanes * sum(sizes[: config.max_batch_size])
        engine = self.engine(most, config.max_batch_size, config.max_batch_tokens, whole=True)
        engine.check(self.recipe)
        return engine

    def _canvas(
        self, ids: IntArray, draft: IntArray, length: int, cap: int,
        given: list[tuple[int, IntArray]], repetition: int,
    ) -> Canvas:  # fmt: skip
        facts = canvas_facts(self.model, self.config)
        canvas = Canvas.for_prompt(ids, length, row=repetition, **facts)
        canvas.cap = cap
        canvas.draft(draft)
        for offset, tokens in given:
            canvas.give(canvas.start + offset, tokens)
        return canvas


@dataclass(frozen=True, kw_only=True)
class Order:
    """What was asked of a session: plain data, of which any process can make the same request.
    ``text`` is what is to be filled; None to answer ``prompt``."""

    prompt: Any
    text: Any = None
    sampler: SamplerLike | None = None
    chat: bool | None = None
    trace: bool = False
    repetition: int = 0
    config: GenerationConfig | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, prompt: Any, text: Any, how: Mapping[str, Any]) -> Order:
        """What is no field of an order in ``how`` becomes an argument."""
        own = {name: how[name] for name in ORDERED if name in how}
        rest = {name: value for name, value in how.items() if name not in ORDERED}
        return cls(prompt=prompt, text=text, arguments=rest, **own)


def given_of(config: GenerationConfig | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a caller named: ``arguments``, and those fields of a ``config`` that are no defaults."""
    if not isinstance(config, GenerationConfig | None):
        raise ConfigError(f"config is a dllm.GenerationConfig, not {short(config)}")
    if config is None:
        return dict(arguments)
    return {**{name: getattr(config, name) for name in config.model_fields_set}, **arguments}


def occurrences(items: Sequence[Hashable]) -> list[int]:
    """For each item how often it stands before."""
    seen: Counter[Hashable] = Counter()
    counts = []
    for item in items:
        counts.append(seen[item])
        seen[item] += 1
    return counts


def _check_repetitions(repetitions: Any, prompts: int) -> None:
    """One whole number from 0 per prompt."""
    if not isinstance(repetitions, Sequence) or not all(
        isinstance(row, int | np.integer) and not isinstance(row, bool) and row >= 0
        for row in repetitions
    ):
        raise ConfigError(f"repetitions are whole numbers from 0, not {short(repetitions)}")
    if len(repetitions) != prompts:
        raise ConfigError(f"{prompts} prompts have as many repetitions, not {len(repetitions)}")
