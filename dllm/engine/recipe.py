"""How one text is written: what belongs to a request and not to the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from ..cache import Cache
from ..core.canvas import BoolArray, Canvas, IntArray
from ..core.capabilities import (
    BLOCK_CAUSAL,
    CONSTRAINED,
    DECIDED_FIRST,
    FIXED_WINDOW,
    MASKED,
    OWN_PREDICTIONS,
    SLIDING_BRANCHES,
    UNIFORM_NOISE,
    Capability,
)
from ..core.config import FILTERS, GenerationConfig
from ..core.errors import ConfigError, PromptError
from ..kernels.statistics import Filters, TokenClasses
from ..models import DiffusionModel, Facts
from ..samplers import NOTHING, Sampler
from ..samplers.base import Draws, Transform
from ..samplers.compose import check_needs
from ..structured.format import Format
from ..structured.judged import TOP, Judged

DEFAULT_LENGTH = 128  # new tokens, where neither the call nor the checkpoint says how many


@dataclass(frozen=True, eq=False, kw_only=True)
class Recipe:
    """How one text is written.  Texts with different recipes share forwards.

    ``config``: temperature, filters, seed, guidance and what else `GenerationConfig` says about a
    text; what it says about the engine is not read here.  ``stop_ids`` end the text.
    ``after_step`` is called with the text's canvas after each of its steps and may finish it.
    ``format``: which texts may be written.
    """

    config: GenerationConfig = field(default_factory=GenerationConfig)
    stop_ids: tuple[int, ...] = ()
    after_step: Callable[[Canvas], None] | None = None
    format: Format | Judged | None = None

    @property
    def filters(self) -> Filters:
        """What tokens are drawn from."""
        config = self.config
        return Filters(config.temperature, config.top_p, config.top_k, config.min_p)

    @property
    def owned(self) -> int:
        """Lanes of keys and values that a row owns."""
        return 1

    @property
    def revises(self) -> bool:
        """Whether decisions may be taken back."""
        return False

    @property
    def grows(self) -> bool:
        """Whether answers find their length."""
        return False

    @property
    def outside(self) -> bool:
        """Whether its tokens come from outside: such a row waits for them and takes no place."""
        return False

    def cap(self, facts: Facts, prompt: int, draft: IntArray = NOTHING) -> int:
        """Most positions of the answer to a prompt of so many tokens, which begins as ``draft``
        (-1 where it is open).  A length that the caller did not name is shortened to what fits."""
        config, limit = self.config, facts.context_length
        block = facts.block_length if facts.uniform else None
        room, wanted = limit - prompt, config.max_new_tokens
        whole = room - room % (block or 1)
        if room < 1:
            raise PromptError(
                f"the prompt has {prompt} tokens, the context {limit}: shorten it by at least "
                f"{prompt - limit + 1}"
            )
        if wanted is None or "max_new_tokens" not in config.model_fields_set:
            if self.grows:
                wanted = max(config.min_new_tokens, room)
            elif (draft < 0).any():
                wanted = len(draft)
            else:
                wanted = max(config.min_new_tokens, min(wanted or DEFAULT_LENGTH, room))
                wanted = min(wanted, whole or wanted)
        if block:  # a canvas is never cut
            wanted += -wanted % block
        if wanted > room:
            remedy = f" or pass max_new_tokens={whole}" if whole else ""
            raise PromptError(
                f"{prompt} prompt tokens and {wanted} new ones exceed the context of {limit}: "
                f"shorten the prompt{remedy}"
            )
        if len(draft) > wanted:
            raise ConfigError(
                f"initial_text has {len(draft)} tokens, the answer at most {wanted}: raise "
                "max_new_tokens"
            )
        return wanted

    def first_length(self, facts: Facts, prompt: int, begun: int, cap: int) -> int:
        """Positions behind the ``begun`` ones of a draft when the row begins, at most ``cap``."""
        return cap


@dataclass(frozen=True, eq=False)
class MaskedRecipe(Recipe):
    """How a canvas is decoded.  ``ban_stops`` keeps stop ids out, as when filling holes."""

    sampler: Sampler
    ban_stops: bool = field(default=False, kw_only=True)

    @cached_property
    def lanes(self) -> int:
        """Lanes of a branch: with guidance the row as it is, and with its given text masked."""
        return 2 if self.config.cfg_scale > 0 else 1

    @property
    def revises(self) -> bool:
        return self.sampler.reviser is not None

    @property
    def grows(self) -> bool:
        return self.sampler.length is not None

    @cached_property
    def width(self) -> int:
        """Branches that a step may feed."""
        return 1 if self.sampler.explorer is None else self.sampler.explorer.width

    @cached_property
    def owned(self) -> int:
        """Lanes that a row owns slots for: of its branches, and one for masks fed again."""
        return self.lanes * self.width + self.sampler.feeds_masks

    def first_length(self, facts: Facts, prompt: int, begun: int, cap: int) -> int:
        rule = self.sampler.length
        if rule is None or not cap:
            return cap
        origin = 0 if facts.mask_kind == "block_causal" else prompt
        length = rule.open(prompt + begun, origin, cap)
        if length > cap:
            raise ConfigError(
                f"{rule.name} begins with {length} positions, and {cap} are the most there may be: "
                f"raise max_new_tokens, or lower what {rule.name} begins with"
            )
        return max(length, self.config.min_new_tokens - begun)


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Arguments of the token statistics that hold for a row.  Rows whose options are equal share
    one call.  ``banned`` ids may not be proposed; the last ``conditional`` of them only at some
    positions, which the row says in each step.
    ``classes``: those of the row's format; ``bias``: what is added to the logits of tokens.
    ``inverse``: draw by the cumulative sum; ``soft``: the expected embedding is wanted; ``scale``:
    what logits are multiplied by before all else; ``signal``: the share of positions that are not
    noise, where what each of them holds is not to be taken for evidence.

    ``keyed``: tokens are drawn by noise with a key; ``own``: a row has numbers of its own beside
    the columns of the statistics."""

    banned: tuple[int, ...]
    conditional: int
    filters: Filters
    top: int
    needs: frozenset[str]
    classes: TokenClasses | None = None
    bias: tuple[tuple[int, float], ...] = ()
    inverse: bool = False
    soft: bool = False
    scale: float = 1.0
    signal: float | None = None
    keyed: bool = field(init=False, compare=False)
    own: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        named = bool({"residual", "judged"} & self.needs)
        own = named or self.signal is not None or self.classes is not None
        object.__setattr__(self, "keyed", self.filters.temperature > 0 and not self.inverse)
        object.__setattr__(self, "own", own)

    def at(self, drawn: Draws) -> Self:
        """Those of a step that reads and draws in a way of its own."""
        filters = self.filters._replace(temperature=1.0)
        return replace(
            self, filters=filters, scale=1 / (drawn.temperature or 1.0), signal=drawn.signal
        )

    @classmethod
    def of(cls, recipe: MaskedRecipe, model: DiffusionModel) -> Self:
        """Those of a row."""
        sampler, config = recipe.sampler, recipe.config
        read = sampler.statistics
        # At temperature 0 the proposal itself is the likeliest token.
        likeliest = read.get("top_token", 0) if config.temperature > 0 else 0
        if isinstance(recipe.format, Judged):
            likeliest, read = max(likeliest, TOP), {**read, "judged": 0}
        return cls(
            *_bans(recipe, model), recipe.filters._replace(k_first=model.family.k_first),
            max(config.top_candidates, likeliest, read.get("top_logprob", 0)), frozenset(read),
            None if recipe.format is None else recipe.format.classes,
            tuple(sorted(config.logit_bias.items())),
            model.facts.uniform and recipe.format is None, model.family.self_conditioning,
        )  # fmt: skip


def _bans(recipe: MaskedRecipe, model: DiffusionModel) -> tuple[tuple[int, ...], int]:
    sampler, config, facts = recipe.sampler, recipe.config, model.facts
    if facts.mask_token_id is None:
        raise ConfigError(
            f"{model.name} is autoregressive: it cannot fill in masks; "
            "load a diffusion model, or use it as a verifier"
        )
    always = {facts.mask_token_id} if config.suppress_mask and not facts.uniform else set()
    always |= {token for part in sampler.parts for token, where in part.bans.items() if not where}
    if facts.expand_token_id is not None:
        always.add(facts.expand_token_id)
    if recipe.ban_stops:
        always |= {*sampler.stop_ids}
    always -= sampler.conditional.keys()
    some = {*sampler.conditional, *(sampler.stop_ids if config.min_new_tokens else ())} - always
    return (*sorted(always), *sorted(some)), len(some)


def bans(
    recipe: MaskedRecipe, canvas: Canvas, positions: IntArray, ids: tuple[int, ...]
) -> BoolArray:
    """(n, m) bool: which of the conditionally banned ``ids`` are so at which positions."""
    result = np.zeros((len(positions), len(ids)), np.bool_)
    for token, places in recipe.sampler.conditional.items():
        for where in places:
            result[:, ids.index(token)] |= where(canvas, positions)
    if recipe.config.min_new_tokens:
        early = positions < canvas.start + recipe.config.min_new_tokens
        result |= early[:, None] & np.isin(ids, recipe.sampler.stop_ids)
    return result


class Setting(NamedTuple):
    """What is no part, and needs something of one."""

    name: str
    needs: frozenset[Capability]


def offers_of(facts: Facts) -> frozenset[Capability]:
    """What a model offers to the parts of a sampler and to a cache."""
    if facts.mask_kind == "decided_first":  # where decided tokens predict the next one
        return frozenset({DECIDED_FIRST})
    offered = {OWN_PREDICTIONS, UNIFORM_NOISE if facts.uniform else MASKED}
    return frozenset(offered | {BLOCK_CAUSAL} if facts.block_length else offered)


def check_pair(sampler: Sampler, cache: Cache) -> None:
    """Raise `ConfigError` where sampler and cache do not go together."""
    offered = cache.offers
    if not cache.stores or cache.branches_slide or FIXED_WINDOW in sampler.window.offers:
        offered |= {SLIDING_BRANCHES}
    check_needs(sampler.parts, "a cache", f"cache={cache.name!r}", offered)
    check_needs([cache], "a sampler", f"sampler={sampler.spec!r}", sampler.offers)


def check_format(sampler: Sampler, judged: bool, filtered: bool = False) -> None:
    """Refuse parts that put tokens of their own in place of a joint completion, unless they say
    that they respect one, and rules of length that may leave too little room for a text.  Where the
    structure is ``judged``: explorers, whose branches they could not compare, and filters."""
    if judged and filtered:
        raise ConfigError(
            f"{', '.join(FILTERS)} need exact probabilities, and this structure has no finite "
            "automaton: drop them, or use a simpler structure"
        )
    if judged and sampler.explorer is not None:
        raise ConfigError(
            f"{sampler.explorer.name} compares branches by exact probabilities, and this structure "
            "has no finite automaton: use a sampler without it, or a simpler structure"
        )
    if sampler.length is not None and CONSTRAINED not in sampler.length.offers:
        raise ConfigError(
            f"{sampler.length.name} changes the length of the answer, which may then be too short "
            "for the structure: pass length='append' or max_new_tokens alone"
        )
    for part in sampler.parts:
        rewrites = (
            isinstance(part, Transform)
            or part.role in ("reviser", "course")
            or "residual" in part.statistics
        )
        if rewrites and CONSTRAINED not in part.offers:
            raise ConfigError(
                f"{part.name} proposes tokens of its own, which may leave the structure: "
                "use a sampler without it, or drop the structure"
            )


def _check_vocabulary(sampler: Sampler, size: int) -> None:
    """Refuse parts that were told ids, or a number of them, that the model does not have."""
    for part in sampler.parts:
        if getattr(part, "vocab_size", None) not in (None, size):
            raise ConfigError(f"{part.name}: vocab_size is the model's, {size}: leave it out")
        for name in ("eos_token_id", "expand_token_id", "delimiters"):
            told = getattr(part, name, None)
            for token in np.ravel([] if told is None else told).tolist():
                if not 0 <= token < size:
                    raise ConfigError(
                        f"{part.name}: {name} {token} is outside the vocabulary of {size}"
                    )


def check_recipe(recipe: MaskedRecipe, cache: Cache, model: DiffusionModel) -> None:
    """Refuse parts that cannot work with the cache, the model or the request."""
    sampler, config = recipe.sampler, recipe.config
    check_pair(sampler, cache)
    _check_vocabulary(sampler, model.facts.vocab_size)
    if config.temperature > 0:
        name = f"temperature={config.temperature}"
        check_needs(sampler.parts, "a temperature", name, frozenset())
    masks = frozenset({MASKED})
    asked = [Setting(f"cfg_scale={config.cfg_scale}", masks)] if config.cfg_scale else []
    check_needs([*sampler.parts, cache, *asked], "a model", model.name, offers_of(model.facts))
    kept = {"decided_first": DECIDED_FIRST, "causal_prefix": BLOCK_CAUSAL}.get(
        model.facts.mask_kind
    )
    if kept is not None:
        named = f"cache={cache.name!r}"
        check_needs([Setting(model.name, frozenset({kept}))], "a cache", named, cache.offers)
    if recipe.format is not None:
        check_format(sampler, isinstance(recipe.format, Judged), recipe.filters.cut)
    mixes = any(MASKED in part.needs for part in sampler.parts)
    if (sampler.feeds_masks or mixes) and config.cfg_scale > 0:
        raise ConfigError(f"{sampler.spec} cannot be guided: use cfg_scale=0")
    implementation = getattr(model.hf.config, "_attn_implementation", "") or ""
    if sampler.feeds_masks and "flash" in implementation:
        raise ConfigError(
            f"{sampler.spec} needs attention masks: load with attn_implementation='sdpa'"
        )
