"""From what users pass to requests: everything that can be wrong is found here, before any step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from . import cache as caches
from . import samplers
from .cache import Cache
from .cache.base import CacheLike
from .canvas import BoolArray, Canvas, IntArray
from .canvases import canvas_facts, canvas_length, check_constraint, fixed_ids
from .capabilities import FIXED_WINDOW
from .config import FORMATS, GenerationConfig
from .engine import Engine, Recipe
from .errors import ConfigError, PromptError, short
from .formats import (
    Format,
    choice_pattern,
    format_of,
    holes_format,
    regex_pattern,
    schema_of,
    schema_pattern,
)
from .holes import measured, name_of
from .models import DiffusionModel
from .prompts import encode, encode_open, hole_forms, is_batch
from .result import Result
from .samplers import NOTHING, Sampler
from .samplers.compose import SamplerLike
from .samplers.compose import lengths as length_rules
from .scheduler import Request, Scheduler
from .stopping import stop_strings
from .work import Work

ORDERED = ("sampler", "chat", "trace", "repetition", "config", "under_load")


@dataclass(frozen=True, eq=False)
class RequestMaker:
    """Makes requests of prompts, all with one ``recipe``.  ``given``: the arguments that the caller
    named, which must not be without effect."""

    model: DiffusionModel
    recipe: Any
    given: frozenset[str] = frozenset()

    kind: ClassVar[type[Result]] = Result

    @property
    def config(self) -> GenerationConfig:
        config: GenerationConfig = self.recipe.config
        return config

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return self.model.facts.stop_token_ids

    def engine(
        self, most: int | None, max_rows: int, max_batch_tokens: int | None, whole: bool = False
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
        fixed = max([offset + len(tokens) for offset, tokens in given], default=0)
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
        seed = self.config.seed_text
        if seed is None:
            return [NOTHING] * count
        each = list(seed) if is_batch(seed) else [seed] * count
        if len(each) != count:
            raise ConfigError(f"{count} prompts have one draft, or as many, not {len(each)}")
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
            return canvas_length(
                self.model, prompt, replace(self.config, max_new_tokens=len(draft))
            )
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
        return Request(index, make, self.recipe, positions, size, self.stop_ids, self.kind, traced)

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

    def scheduler(self, requests: Sequence[Request]) -> Scheduler:
        """An engine that holds the ``max_rows`` largest requests, and all of them in its queue."""
        config, lanes = self.config, self.recipe.lanes * self.recipe.width
        sizes = sorted((request.positions for request in requests), reverse=True)
        most = None if self.grows else lanes * sum(sizes[: config.max_rows])
        engine = self.engine(most, config.max_rows, config.max_batch_tokens, whole=True)
        engine.check(self.recipe)
        scheduler = Scheduler(self.model, engine)
        for request in requests:
            request.submitted = time.perf_counter()  # making the engine was no waiting
            scheduler.add(request)
        return scheduler

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


@dataclass(frozen=True, eq=False)
class Preparation(RequestMaker):
    """A sampler, a cache and arguments that go together on a diffusion model."""

    recipe: Recipe
    cache: Cache = field(kw_only=True)
    named: SamplerLike = field(kw_only=True)  # the sampler, as the caller named it
    holes: str = field(default="sure", kw_only=True)  # how long holes are that do not say
    loose: SamplerLike | None = field(default=None, kw_only=True)  # of steps while others wait

    # What a session takes for it.
    SESSION = ("cache", "sampler", "length", "cuda_graphs", "compile", "under_load")

    @classmethod
    def for_session(
        cls, model: DiffusionModel, cache: CacheLike, sampler: SamplerLike | None,
        under_load: SamplerLike | None = None, **arguments: Any,
    ) -> Preparation:  # fmt: skip
        """What the requests of a session have in common."""
        made = cls.of(model, sampler or "threshold", cache, None, arguments)
        if under_load is not None:
            made.loosened(under_load)
        return replace(made, loose=under_load)

    def loosened(self, sampler: SamplerLike) -> Recipe:
        """The recipe with another sampler, to which a row can change at any step."""
        own = self.sampler
        other = _compose(self.model, sampler, self.config, dict.fromkeys(self.given))
        if replace(other, spec=own.spec, selectors=own.selectors) != own:
            raise ConfigError(
                f"under_load={other.spec!r} differs from {own.spec!r} in more than which positions "
                "a step decides: name a rule for the same window, such as 'threshold(tau=0.7)'"
            )
        return replace(self.recipe, sampler=other)

    @property
    def sampler(self) -> Sampler:
        return self.recipe.sampler

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
        given = given_of(config, arguments)
        defaults = dict(model.generation_defaults) if config is None else {}
        if holes:
            fixed = set(given) & {"max_new_tokens", "min_new_tokens", "eos_policy", "constraints",
                                  "seed_text", "remask"}  # fmt: skip
            if fixed:
                raise ConfigError(f"infill writes what the holes ask for: drop {sorted(fixed)[0]}")
            defaults = {**defaults, "max_new_tokens": None, "eos_policy": "none"}
        rule = given.get("length") or "sure"
        if holes and name_of(rule) not in length_rules(fills=True):
            given.pop("length", None)
        built = GenerationConfig.build(defaults, given)
        composed = _compose(model, sampler, built, given)
        if not holes and _unbounded(model, built, given, composed):
            with suppress(ConfigError):  # what plans for a canvas of one length has one
                composed = _compose(model, sampler, replace(built, length="append"), given)
        watch = stop_strings(model, built) if built.stop_strings else None
        form = format_for(model, built, holes)
        part = composed.length
        if holes and part is not None:
            rule = part.name
            if not part.fills:
                raise ConfigError(
                    f"{rule} lengthens an answer at its end, and a text with holes has none: "
                    "write [[*]], or drop it"
                )
        if composed.bannable and built.min_new_tokens:
            raise ConfigError(
                "min_new_tokens does not go with a length that shrinks where it is written: drop it"
            )
        recipe = Recipe(composed, built, ban_stops=holes, after_step=watch, format=form)
        chosen = caches.compose(cache, model.family.name)
        return cls(model, recipe, frozenset(given), cache=chosen, named=sampler,
                   holes=rule)  # fmt: skip

    @property
    def grows(self) -> bool:
        return self.sampler.length is not None

    def cap(self, prompt: int, draft: IntArray = NOTHING) -> int:
        if self.grows and "max_new_tokens" not in self.given:
            draft = NOTHING
        cap = super().cap(prompt, draft)
        given = "max_new_tokens" in self.given or not self.grows
        return cap if given else self.model.facts.context_length - prompt

    def first_length(self, prompt: int, begun: int, cap: int) -> int:
        rule = self.sampler.length
        if rule is None or not cap:
            return cap
        origin = 0 if self.model.facts.block_length else prompt
        length = rule.open(prompt + begun, origin, cap)
        if length > cap:
            raise ConfigError(
                f"{rule.name} begins with {length} positions, and {cap} are the most there may be: "
                f"raise max_new_tokens, or lower what {rule.name} begins with"
            )
        return max(length, self.config.min_new_tokens - begun)

    def text(
        self, text: Any, prompt: Any = None, traced: bool = False, repetition: int = 0
    ) -> Request:
        """A request that fills the holes of a text, behind a prompt.  Those whose length it does
        not say are measured here, in forwards of their own."""
        before = np.zeros(0, np.int64) if prompt is None else encode(self.model, prompt)
        found = measured(self.model, text, before, self.holes)
        ids, holes = found.ids, found.holes
        total, limit = len(before) + len(ids), self.model.facts.context_length
        if total > limit:
            raise PromptError(
                f"{total} tokens exceed the context of {limit}: shorten the text or its holes"
            )
        self._check_used(len(ids), traced)
        tokens = np.concatenate([before, ids])
        masked = np.concatenate([np.zeros(len(before), np.bool_), holes])

        def make() -> Canvas:
            canvas = Canvas.for_infill(
                tokens, masked, len(before), row=repetition, sizes=found.sizes,
                bounds=found.bounds, **canvas_facts(self.model, self.config),
            )  # fmt: skip
            canvas.probes = canvas.nfe = found.probes
            canvas.computed = found.computed
            return canvas

        forms = hole_forms(text)
        how = self if not any(forms) else self._with_holes(forms, holes)
        how._check_room(make())
        return how._request(0, make, total, int(holes.sum()), traced)

    def _with_holes(self, forms: Sequence[str | None], holes: BoolArray) -> Preparation:
        """The same for a text whose holes have forms of their own."""
        if self.config.formatted:
            raise ConfigError(
                f"holes have a form, and so has the text: drop {self.config.formatted}"
            )
        if np.count_nonzero(np.diff(holes, prepend=False) & holes) != len(forms):
            raise ConfigError("holes with a form need text between them: make them one hole")
        patterns = [None if form is None else regex_pattern(form) for form in forms]
        recipe = replace(self.recipe, format=holes_format(self.model, patterns, bool(holes[0])))
        return replace(self, recipe=recipe)

    def engine(
        self, most: int | None, max_rows: int, max_batch_tokens: int | None, whole: bool = False
    ) -> Engine:
        return Engine(
            self.model, self.cache, slots=most if whole else None, most=most, max_rows=max_rows,
            max_batch_tokens=max_batch_tokens, cuda_graphs=self.config.cuda_graphs,
            compile=self.config.compile,
        )  # fmt: skip

    def request(self, order: Order) -> Request:
        arguments, default = order.arguments, self.config.length
        open_ = order.text is None and order.config is None and not arguments.keys() & FORMATS
        if default is not None and open_:
            arguments = {"length": default, **arguments}
        how = Preparation.of(
            self.model, self.named if order.sampler is None else order.sampler, self.cache,
            order.config, arguments, order.text is not None,
        )  # fmt: skip
        if order.text is not None:
            request = how.text(order.text, order.prompt, order.trace, order.repetition)
        else:
            (request,) = how.prompts([order.prompt], order.chat, [order.repetition], 1, order.trace)
        allowed = order.sampler is None if order.under_load is None else order.under_load
        if self.loose is not None and allowed:
            request.loose = how.loosened(self.loose)
        return request


@dataclass(frozen=True, kw_only=True)
class Order:
    """What was asked of a session: plain data, of which any process can make the same request.
    ``text`` is what is to be filled; None to answer ``prompt``.
    ``under_load``: whether the session may decide more at once while others wait; None: where no
    sampler is named."""

    prompt: Any
    text: Any = None
    sampler: SamplerLike | None = None
    chat: bool | None = None
    trace: bool = False
    repetition: int = 0
    config: GenerationConfig | None = None
    under_load: bool | None = None
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
    plain = GenerationConfig()
    own = {k: v for k, v in vars(config).items() if v != getattr(plain, k)}
    return {**own, **arguments}


def format_for(
    model: DiffusionModel, config: GenerationConfig, holes: bool = False
) -> Format | None:
    """Which texts may be written; None where any may."""
    if config.regex is not None:
        pattern = regex_pattern(config.regex)
    elif config.choice is not None:
        pattern = choice_pattern(config.choice)
    elif config.json_schema is not None:
        pattern = schema_pattern(schema_of(config.json_schema))
    else:
        return None
    return format_of(model, pattern, not holes, config.literals)


def _compose(
    model: DiffusionModel,
    sampler: SamplerLike,
    config: GenerationConfig,
    given: Mapping[str, Any],
) -> Sampler:
    """The sampler for this model.  What the call gives must be of use to some part; what the
    checkpoint recommends need not."""
    options = {key: value for key, value in config.sampler_options.items() if key in given}
    facts = {
        **config.sampler_options, "delimiters": model.delimiters,
        "eos_token_id": model.facts.eos_token_id,
        "expand_token_id": model.facts.expand_token_id,
        "block": model.facts.block_length or config.block_length,
        "lookahead": int(model.facts.mask_kind == "bidirectional"),
    }  # fmt: skip
    return samplers.compose(
        sampler, length=config.length, options=options, stop_ids=model.facts.stop_token_ids,
        family=model.family.name, facts=facts,
    )  # fmt: skip


def _unbounded(
    model: DiffusionModel, config: GenerationConfig, given: Mapping[str, Any], sampler: Sampler
) -> bool:
    """Whether nobody names a length and the answer gets block after block until it ends: on models
    whose attention is causal between blocks, decoded in these, where that equals the largest canvas
    to the last bit."""
    blocks, ends = model.facts.block_length, sampler.eos.ends and sampler.stop_ids
    named = given.get("length") or config.max_new_tokens or config.formatted
    whole = FIXED_WINDOW in sampler.window.offers
    own = whole and getattr(sampler.window, "block_length", None) == blocks
    drafted = config.seed_text is not None
    return bool(blocks and ends and own) and not (named or drafted or sampler.length)


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
