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
from .kernels.noise import uniform
from .models import DiffusionModel
from .prompts import encode, encode_continuation, encode_open, hole_forms, is_batch
from .result import Result
from .samplers import NOTHING, Sampler
from .samplers.compose import SamplerLike
from .samplers.compose import lengths as length_rules
from .scheduler import Request, Scheduler
from .text import stop_at
from .work import Work

ORDERED = ("sampler", "chat", "trace", "repetition", "config")
DEFAULT_LENGTH = 128  # new tokens, where neither the call nor the checkpoint says how many


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
            (offset, _constraint(self.model, wanted))
            for offset, wanted in self.config.constraints.items()
        ]
        fixed = max([offset + len(tokens) for offset, tokens in given], default=0)
        for ids, draft, cap, first in zip(encoded, drafts, caps, repetitions, strict=True):
            for offset, tokens in given:
                _check_constraint(offset, tokens, cap)
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
        facts = _facts(self.model, self.config)
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

    SESSION = (
        "cache",
        "sampler",
        "length",
        "cuda_graphs",
        "compile",
    )  # what a session takes for it

    @classmethod
    def for_session(
        cls, model: DiffusionModel, cache: CacheLike, sampler: SamplerLike | None, **arguments: Any
    ) -> Preparation:
        """What the requests of a session have in common."""
        return cls.of(model, sampler or "threshold", cache, None, arguments)

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
                bounds=found.bounds,
                **_facts(self.model, self.config),
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
            return how.text(order.text, order.prompt, order.trace, order.repetition)
        (request,) = how.prompts([order.prompt], order.chat, [order.repetition], 1, order.trace)
        return request


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
    plain = GenerationConfig()
    own = {k: v for k, v in vars(config).items() if v != getattr(plain, k)}
    return {**own, **arguments}


def format_for(
    model: DiffusionModel, config: GenerationConfig, holes: bool = False
) -> Format | None:
    """Which texts may be written; None where any may."""
    if config.regex is not None:
        return format_of(model, regex_pattern(config.regex), ends=not holes)
    if config.choice is not None:
        return format_of(model, choice_pattern(config.choice), ends=not holes)
    if config.json_schema is not None:
        pattern = schema_pattern(schema_of(config.json_schema))
        return format_of(model, pattern, ends=not holes)
    return None


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
    named = {"length", "seed_text"} & given.keys() or config.max_new_tokens or config.formatted
    whole = FIXED_WINDOW in sampler.window.offers
    own = whole and getattr(sampler.window, "block_length", None) == blocks
    return bool(blocks and ends and own) and not named and sampler.length is None


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


def canvas_length(
    model: DiffusionModel, prompt: int, config: GenerationConfig, given: bool = True
) -> int:
    """How many positions to write after ``prompt`` tokens, within the context.  A length that is
    not ``given`` by the caller is shortened to what fits."""
    limit = model.facts.context_length
    room, wanted = limit - prompt, config.max_new_tokens
    if room < 1:
        raise PromptError(
            f"the prompt has {prompt} tokens, the context {limit}: shorten it by at least "
            f"{prompt - limit + 1}"
        )
    if wanted is None or not given:
        wanted = max(config.min_new_tokens, min(wanted or DEFAULT_LENGTH, room))
    if wanted > room:
        raise PromptError(
            f"{prompt} prompt tokens and {wanted} new ones exceed the context of {limit}: "
            f"shorten the prompt or pass max_new_tokens={room}"
        )
    return wanted


@dataclass(slots=True)
class StopSearch:
    """What the search for stop strings remembers of a row: how far it has looked."""

    frontier: int | None = None


def stop_strings(model: DiffusionModel, config: GenerationConfig) -> Callable[[Canvas], None]:
    """After a step: finish a row whose decided beginning contains a stop string, also where a stop
    id of the same step lies behind it.  The text does not end before what is given in it."""
    if model.tokenizer is None:
        raise ConfigError(f"{model.name} came without a tokenizer: it has no stop_strings")
    tokenizer = model.tokenizer

    def decode(tokens: IntArray) -> str:
        return str(tokenizer.decode(tokens.tolist()))

    def check(canvas: Canvas) -> None:
        if canvas.revising:
            return
        undecided = canvas.masked[canvas.start : canvas.end]
        frontier = int(undecided.argmax()) if undecided.any() else len(undecided)
        search = canvas.state(StopSearch)
        if frontier == search.frontier:
            return
        search.frontier = frontier
        tokens = canvas.tokens[canvas.start : canvas.start + frontier]
        last = _stop_in(decode, tokens, config.stop_strings, canvas.text_floor - canvas.start)
        if last is not None:
            canvas.stop_position = canvas.start + last
            canvas.cut(canvas.stop_position)
            canvas.finish("stop")

    return check


def _stop_in(
    decode: Callable[[IntArray], str], tokens: IntArray, stops: Sequence[str], floor: int
) -> int | None:
    """Index of the token that completes the first stop string, beyond the first ``floor`` ones."""
    if len(tokens) <= floor:
        return None
    least = len(decode(tokens[:floor])) if floor > 0 else 0

    def stopped(index: int) -> bool:
        return stop_at(decode(tokens[: index + 1]), stops, least) is not None

    if not stopped(len(tokens) - 1):
        return None
    low, high = max(0, floor), len(tokens) - 1
    while low < high:
        middle = (low + high) // 2
        if stopped(middle):
            high = middle
        else:
            low = middle + 1
    return low
