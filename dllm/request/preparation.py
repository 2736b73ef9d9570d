"""From what users pass to requests: everything that can be wrong is found here, before any step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .. import cache as caches
from .. import samplers
from ..cache import Cache
from ..cache.base import CacheLike
from ..core.canvas import BoolArray, Canvas, IntArray
from ..core.capabilities import FIXED_WINDOW
from ..core.config import FORMATS, GenerationConfig
from ..core.declared import HOLES, MACHINE
from ..core.errors import ConfigError, PromptError
from ..engine import Engine, Recipe
from ..models import DiffusionModel
from ..samplers import NOTHING, Sampler
from ..samplers.compose import SamplerLike
from ..samplers.compose import lengths as length_rules
from ..structured import source
from ..structured.building import format_of, holes_format
from ..structured.format import Format
from .canvases import canvas_facts
from .holes import measured, name_of
from .prompts import encode, hole_forms
from .request import Request
from .request_maker import Order, RequestMaker, given_of
from .stopping import stop_strings


@dataclass(frozen=True, eq=False)
class Preparation(RequestMaker):
    """A sampler, a cache and arguments that go together on a diffusion model."""

    recipe: Recipe
    cache: Cache = field(kw_only=True)
    named: SamplerLike = field(kw_only=True)  # the sampler, as the caller named it
    holes: str = field(default="sure", kw_only=True)  # how long holes are that do not say

    # What a session takes for it.
    SESSION = ("cache", "sampler", "length", "cuda_graphs", "compile")

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
            theirs = GenerationConfig.fields(HOLES, MACHINE)
            fixed = [name for name in GenerationConfig.fields() if name in given.keys() - theirs]
            if fixed:
                raise ConfigError(f"infill writes what the holes ask for: drop {fixed[0]}")
            defaults = {**defaults, "max_new_tokens": None, "eos_policy": "none"}
        rule = given.get("length") or "sure"
        if holes and name_of(rule) not in length_rules(fills=True):
            given.pop("length", None)
        built = GenerationConfig.build(defaults, given)
        composed = _compose(model, sampler, built, given)
        if not holes and _unbounded(model, built, given, composed):
            with suppress(ConfigError):  # what plans for a canvas of one length has one
                composed = _compose(model, sampler, built.but(length="append"), given)
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
        sources = [None if form is None else source.regex(form) for form in forms]
        recipe = replace(self.recipe, format=holes_format(self.model, sources, bool(holes[0])))
        return replace(self, recipe=recipe)

    def engine(
        self,
        most: int | None,
        max_batch_size: int,
        max_batch_tokens: int | None,
        whole: bool = False,
    ) -> Engine:
        return Engine(
            self.model, self.cache, slots=most if whole else None, most=most,
            max_batch_size=max_batch_size, max_batch_tokens=max_batch_tokens,
            cuda_graphs=self.config.cuda_graphs, compile=self.config.compile,
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


def format_for(
    model: DiffusionModel, config: GenerationConfig, holes: bool = False
) -> Format | None:
    """Which texts may be written; None where any may."""
    if config.regex is not None:
        wanted = source.regex(config.regex)
    elif config.choice is not None:
        wanted = source.choice(config.choice)
    elif config.json_schema is not None:
        wanted = source.json_schema(config.json_schema)
    else:
        return None
    return format_of(model, wanted, not holes, config.literals)


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
        "vocab_size": model.facts.vocab_size,
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
    drafted = config.initial_text is not None
    return bool(blocks and ends and own) and not (named or drafted or sampler.length)
