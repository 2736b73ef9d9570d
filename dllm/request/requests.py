"""From what users pass to requests: everything that can be wrong is found here, before any step."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .. import samplers
from ..cache import Cache
from ..core.canvas import Canvas, IntArray
from ..core.capabilities import FIXED_WINDOW
from ..core.config import FORMATS, GenerationConfig
from ..core.declared import HOLES, MACHINE
from ..core.errors import ConfigError, PromptError, check_switch, check_whole, short
from ..core.text import hole_forms
from ..engine import Engine, MaskedRecipe, Recipe
from ..kernels.noise import uniform
from ..models import DiffusionModel
from ..samplers import NOTHING, Sampler
from ..samplers.compose import SamplerLike
from ..samplers.compose import lengths as length_rules
from ..structured import source
from ..structured.building import format_of, holes_format
from ..structured.format import Format
from ..structured.judged import Judged
from .holes import measured, name_of
from .prompts import (
    check_lengths_alone,
    encode,
    encode_continuation,
    encode_open,
    is_batch,
    tokenizer_of,
)
from .request import Request
from .stopping import stop_strings

MOST_COMPOSED = 64  # samplers that are remembered, of a model
COMPOSED: WeakKeyDictionary[DiffusionModel, dict[Any, Sampler]] = WeakKeyDictionary()
Fixed = list[tuple[int, IntArray]]  # offsets in the answer, and the ids that stand there

# -- how a text is decoded ------------------------------------------------------------------------


def recipe_for(
    model: DiffusionModel, sampler: SamplerLike | None, config: GenerationConfig | None = None,
    arguments: Mapping[str, Any] | None = None, holes: bool = False,
) -> MaskedRecipe:  # fmt: skip
    """The sampler (None: the model's own) and the arguments that go together on a diffusion model.
    ``config`` stands in place of the checkpoint's defaults, ``arguments`` are single fields of it.
    ``holes``: for a text with holes, which is as long as it is, and in which nothing ends."""
    given = given_of(config, arguments or {})
    defaults = dict(model.generation_defaults) if config is None else {}
    if holes:
        theirs = GenerationConfig.fields(HOLES, MACHINE)
        fixed = [name for name in GenerationConfig.fields() if name in given.keys() - theirs]
        if fixed:
            raise ConfigError(f"infill writes what the holes ask for: drop {fixed[0]}")
        defaults = {**defaults, "max_new_tokens": None, "eos_policy": "none"}
    built = GenerationConfig.build(defaults, given)
    sampler = model.family.sampler if sampler is None else sampler
    # Some rules of length are parts of samplers, which fill holes while they write.
    fills = built.length is not None and name_of(built.length) in length_rules(fills=True)
    measures = holes and "length" in given and not fills
    composed = _compose(model, sampler, built, None if measures else built.length)
    if not holes and not given.get("length") and _unbounded(model, built, composed):
        with suppress(ConfigError):  # what plans for a canvas of one length has one
            composed = _compose(model, sampler, built, "append")
    if holes and composed.length is not None and composed.length.edits != "holes":
        raise ConfigError(
            f"{composed.length.name} lengthens an answer at its end, and a text with holes has "
            "none: write [[*]], or drop it"
        )
    if composed.conditional and built.min_new_tokens:
        raise ConfigError(
            "min_new_tokens does not go with a length that shrinks where it is written: drop it"
        )
    return MaskedRecipe(
        composed, config=built, ban_stops=holes, stop_ids=model.facts.stop_token_ids,
        after_step=stop_strings(model, built) if built.stop_strings else None,
        format=format_for(model, built, holes),
    )  # fmt: skip


def given_of(config: GenerationConfig | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a caller named: ``arguments``, and those fields of a ``config`` that are no defaults."""
    if not isinstance(config, GenerationConfig | None):
        raise ConfigError(f"config is a dllm.GenerationConfig, not {short(config)}")
    if config is None:
        return dict(arguments)
    return {**{name: getattr(config, name) for name in config.model_fields_set}, **arguments}


def format_for(
    model: DiffusionModel, config: GenerationConfig, holes: bool = False
) -> Format | Judged | None:
    """Which texts may be written; None where any may."""
    name = config.formatted
    if name is None:
        return None
    more = (config.extra_keys,) if name == "json_schema" else ()
    wanted = getattr(source, name)(getattr(config, name), *more)  # there is one for each
    return format_of(model, wanted, not holes, config.literals)


def _compose(
    model: DiffusionModel, sampler: SamplerLike, config: GenerationConfig, length: str | None
) -> Sampler:
    """The sampler for this model.  What the call gives must be of use to some part; what the
    checkpoint recommends need not.  Those of the last names are remembered."""
    options = {name: getattr(config, name) for name in ("steps", "block_length", "eos_policy")}
    wanted = {name: value for name, value in options.items() if value is not None}
    named = frozenset(wanted.keys() & config.model_fields_set)
    spec = sampler if isinstance(sampler, str) else None
    key = spec, length, tuple(wanted.items()), named, samplers.SAMPLERS.version
    known = COMPOSED.setdefault(model, {})
    if spec is not None and key in known:
        return known[key]
    stated = model.generation_defaults
    facts = {
        **{name: stated[name] for name in model.family.sampler_fields if name in stated},
        **wanted, "delimiters": model.delimiters,
        "eos_token_id": model.facts.eos_token_id,
        "expand_token_id": model.facts.expand_token_id,
        "vocab_size": model.facts.vocab_size,
        "block": model.facts.block_length or config.block_length,
        "lookahead": int(model.facts.mask_kind == "bidirectional"),
    }  # fmt: skip
    made = samplers.compose(
        sampler, length=length, options={name: wanted[name] for name in named},
        stop_ids=model.facts.stop_token_ids, family=model.family.name, facts=facts,
    )  # fmt: skip
    if len(known) >= MOST_COMPOSED:
        known.clear()
    if spec is not None:
        known[key] = made
    return made


def _unbounded(model: DiffusionModel, config: GenerationConfig, sampler: Sampler) -> bool:
    """Whether nobody names a length and the answer gets block after block until it ends: on models
    whose attention is causal between blocks, decoded in these, where that equals the largest canvas
    to the last bit."""
    blocks = model.facts.block_length
    if not blocks or sampler.length is not None or not (sampler.eos.ends and sampler.stop_ids):
        return False
    if config.max_new_tokens or config.formatted or config.initial_text is not None:
        return False
    whole = FIXED_WINDOW in sampler.window.offers
    return whole and getattr(sampler.window, "block_length", None) == blocks


# -- answers to prompts ---------------------------------------------------------------------------


def requests_for(
    model: DiffusionModel, recipe: Recipe, prompts: Sequence[Any], chat: bool | None = None,
    repetitions: Sequence[int] | None = None, n: int = 1, trace: bool = False,
    seen: Counter[Hashable] | None = None,
) -> list[Request]:  # fmt: skip
    """``n`` requests per prompt, each with noise of its own; their canvases are made when they
    are admitted.  ``seen`` counts the prompts of former calls that these go on from."""
    if not prompts:
        raise PromptError("there is no prompt: pass a string, messages, ids, or a list of them")
    check_whole("n", n)
    check_switch("trace", trace)
    config, facts = recipe.config, model.facts
    encoded = [encode(model, prompt, chat) for prompt in prompts]
    if repetitions is None:
        repetitions = [n * i for i in occurrences([ids.tobytes() for ids in encoded], seen)]
    else:
        _check_repetitions(repetitions, len(prompts))
    drafts = [NOTHING] * len(prompts)
    if config.initial_text is not None:
        drafts = _drafts(model, config, len(prompts))
    caps = [recipe.cap(facts, len(ids), draft) for ids, draft in zip(encoded, drafts, strict=True)]
    _check_used(model, config, max(caps), trace)
    fixed, least = _fixed(model, config.constraints) if config.constraints else ([], 0)
    requests: list[Request] = []
    for ids, draft, cap, first in zip(encoded, drafts, caps, repetitions, strict=True):
        for offset, tokens in fixed:
            if offset + len(tokens) > cap:
                raise ConfigError(
                    f"the constraint of {len(tokens)} tokens at offset {offset} does not fit an "
                    f"answer of {cap} tokens: raise max_new_tokens"
                )
        begun = len(draft)
        length = begun + recipe.first_length(facts, len(ids), begun, cap - begun)
        size = max(length, least)
        make = partial(_canvas, model, config, ids, draft, size, cap, fixed)
        if recipe.format is not None:
            _check_room(recipe, make(0), facts.context_length)
        for row in range(first, first + n):
            index, positions = len(requests), len(ids) + size
            requests.append(Request(index, partial(make, row), recipe, positions, size, trace))
    return requests


def _canvas(
    model: DiffusionModel, config: GenerationConfig, ids: IntArray, draft: IntArray, length: int,
    cap: int, fixed: Fixed, repetition: int,
) -> Canvas:  # fmt: skip
    canvas = Canvas.for_prompt(ids, length, row=repetition, **_canvas_facts(model, config))
    canvas.cap = cap
    if len(draft):
        canvas.draft(draft)
    for offset, tokens in fixed:
        canvas.give(canvas.start + offset, tokens)
    return canvas


def _canvas_facts(model: DiffusionModel, config: GenerationConfig) -> dict[str, Any]:
    """What every canvas of a model is made with."""
    facts, seed = model.facts, config.seed
    mask = -1 if facts.mask_token_id is None else facts.mask_token_id
    pad = facts.pad_token_id if facts.pad_token_id is not None else facts.eos_token_id
    return {
        "mask_id": mask,
        "pad_id": mask if pad is None else pad,
        "noise": lambda stream, step, at: uniform(seed, stream, at, step, 0),
    }


def _drafts(model: DiffusionModel, config: GenerationConfig, count: int) -> list[IntArray]:
    """What each of so many answers begins as, -1 where it is open."""
    seed = config.initial_text
    each = list(seed) if is_batch(seed) else [seed] * count
    if len(each) != count:
        raise ConfigError(
            f"initial_text is one for all prompts, {count} here, or a list of as many, not of "
            f"{len(each)}"
        )
    for one in each:
        check_lengths_alone(one, "initial_text")
    drafts = [encode_open(model, one, "initial_text", continued=True) for one in each]
    for draft in drafts:
        for low, high in config.remask:
            if high > len(draft):
                raise ConfigError(
                    f"remask names position {high - 1}, and initial_text has {len(draft)} tokens"
                )
            draft[low:high] = -1
    return drafts


def _fixed(model: DiffusionModel, constraints: Mapping[int, int | str]) -> tuple[Fixed, int]:
    """What is fixed in an answer, and where the last of it ends; raises where two overlap."""
    fixed = [(offset, _fixed_ids(model, wanted)) for offset, wanted in sorted(constraints.items())]
    end = 0
    for offset, tokens in fixed:
        if offset < end:
            raise ConfigError(
                f"the constraint at offset {offset} stands in the tokens of the one before it, "
                f"which end at {end}: move it, or join both texts"
            )
        end = offset + len(tokens)
    return fixed, end


def _fixed_ids(model: DiffusionModel, wanted: int | str) -> IntArray:
    if isinstance(wanted, int):
        ids = [wanted]
    else:
        ids = encode_continuation(tokenizer_of(model, "constrain to token ids"), wanted)
    if not all(0 <= token < model.facts.vocab_size for token in ids):
        raise ConfigError(
            f"the constraint {wanted!r} is no id of the vocabulary of {model.facts.vocab_size}"
        )
    if model.facts.mask_token_id in ids:
        raise ConfigError(f"the constraint {wanted!r} is the mask token: leave it out")
    return np.asarray(ids, np.int64)


# -- texts with holes -----------------------------------------------------------------------------


def infill_request(
    model: DiffusionModel, recipe: MaskedRecipe, text: Any, prompt: Any = None,
    trace: bool = False, repetition: int = 0,
) -> Request:  # fmt: skip
    """A request that fills the holes of a text, behind a prompt.  Those whose length it does not
    say are measured here, in forwards of their own."""
    check_switch("trace", trace)
    _check_repetitions([repetition], 1)
    before = NOTHING if prompt is None else encode(model, prompt)
    part = recipe.sampler.length
    measure = recipe.config.length if "length" in recipe.config.model_fields_set else None
    found = measured(model, text, before, (measure or "sure") if part is None else part.name)
    ids, holes = found.ids, found.holes
    total, limit = len(before) + len(ids), model.facts.context_length
    if total > limit:
        raise PromptError(
            f"{total} tokens exceed the context of {limit}: shorten the text or its holes"
        )
    _check_used(model, recipe.config, len(ids), trace)
    tokens = np.concatenate([before, ids])
    masked = np.concatenate([np.zeros(len(before), np.bool_), holes])

    def make() -> Canvas:
        canvas = Canvas.for_infill(
            tokens, masked, len(before), row=repetition, sizes=found.sizes, bounds=found.bounds,
            **_canvas_facts(model, recipe.config),
        )  # fmt: skip
        canvas.probes = canvas.nfe = found.probes
        canvas.computed = found.computed
        return canvas

    forms = hole_forms(text)
    if any(forms):
        if other := recipe.config.formatted:
            raise ConfigError(
                f"holes have regular expressions of their own: drop {other}, or those"
            )
        if np.count_nonzero(np.diff(holes, prepend=False) & holes) != len(forms):
            raise ConfigError(
                "holes with a regular expression need text between them: make them one hole"
            )
        sources = [None if form is None else source.regex(form) for form in forms]
        recipe = replace(recipe, format=holes_format(model, sources, bool(holes[0])))
    if recipe.format is not None:
        _check_room(recipe, make(), limit)
    return Request(0, make, recipe, total, int(holes.sum()), trace)


# -- what a session is asked for ------------------------------------------------------------------


def one_request(
    model: DiffusionModel, sampler: SamplerLike | None, length: str | None, prompt: Any, text: Any,
    how: Mapping[str, Any],
) -> Request:  # fmt: skip
    """An answer to ``prompt``, or a ``text`` to fill if there is one.  ``how``: what the request
    names; ``sampler`` and ``length`` are for those that do not."""
    given = dict(how)
    named, config = given.pop("sampler", None), given.pop("config", None)
    sampler = sampler if named is None else named
    chat, trace = given.pop("chat", None), given.pop("trace", False)
    repetition = given.pop("repetition", 0)
    if text is not None:
        recipe = recipe_for(model, sampler, config, given, holes=True)
        return infill_request(model, recipe, text, prompt, trace, repetition)
    if length is not None and config is None and not given.keys() & FORMATS:
        given = {"length": length, **given}
    recipe = recipe_for(model, sampler, config, given)
    return requests_for(model, recipe, [prompt], chat, [repetition], trace=trace)[0]


# -- what all of them share -----------------------------------------------------------------------


def engine_for(
    model: DiffusionModel, cache: Cache, requests: Sequence[Request], grows: bool = False
) -> Engine:
    """An engine with room for ``requests``, which have one recipe; it ``grows`` with others."""
    recipe, most = requests[0].recipe, None if grows else positions_for(requests)
    config = recipe.config
    engine = Engine(
        model, cache, slots=most, most=most, max_batch_size=config.max_batch_size,
        max_batch_tokens=config.max_batch_tokens, cuda_graphs=config.cuda_graphs,
    )  # fmt: skip
    engine.check(recipe)
    return engine


def positions_for(requests: Sequence[Request]) -> int | None:
    """Positions of keys and values that the ``max_batch_size`` largest requests own; None where
    they may grow."""
    recipe: Recipe = requests[0].recipe
    sizes = sorted([request.positions for request in requests], reverse=True)
    return None if recipe.grows else recipe.owned * sum(sizes[: recipe.config.max_batch_size])


def occurrences(items: Sequence[Hashable], seen: Counter[Hashable] | None = None) -> list[int]:
    """For each item how often it stands before, here or in what was ``seen``."""
    seen = Counter() if seen is None else seen
    counts = []
    for item in items:
        counts.append(seen[item])
        seen[item] += 1
    return counts


def _check_repetitions(repetitions: Any, prompts: int) -> None:
    """One whole number from 0 per prompt, small enough for streams of noise (`PURPOSES` each)."""
    if not isinstance(repetitions, Sequence) or not all(
        isinstance(row, int | np.integer) and not isinstance(row, bool) and 0 <= row < 2**29
        for row in repetitions
    ):
        raise ConfigError(
            f"repetitions are whole numbers from 0, not {short(repetitions)}: stay below 2**29"
        )
    if len(repetitions) != prompts:
        raise ConfigError(f"{prompts} prompts have as many repetitions, not {len(repetitions)}")


def _check_room(recipe: Recipe, canvas: Canvas, limit: int) -> None:
    """Refuse a canvas in which no text of the format can be written, or a context of ``limit``."""
    form = recipe.format
    if form is None or form.fits(canvas):
        return
    name = (recipe.config.formatted or "form").removeprefix("json_")
    room, least = int(canvas.masked.sum()), form.least()
    if canvas.prompt_length + least > limit >= least:
        raise PromptError(
            f"the prompt has {canvas.prompt_length} tokens, a text of this {name} at least {least} "
            f"and the context {limit}: shorten the prompt"
        )
    if room == canvas.end - canvas.start and least > room and not canvas.holes:
        raise ConfigError(
            f"a text of this {name} has at least {least} tokens, max_new_tokens is {room}: raise it"
        )
    raise ConfigError(
        f"no text of this {name} fits the {room} open positions and what stands around them"
    )


def _check_used(model: DiffusionModel, config: GenerationConfig, canvas: int, trace: bool) -> None:
    """Refuse what the caller named and what would change nothing."""
    size = model.facts.vocab_size
    for token in config.logit_bias:
        if token >= size:
            raise ConfigError(f"logit_bias: token id {token} is outside the vocabulary of {size}")
    tempered = model.facts.score_source == "tempered"
    config.check_used(canvas=canvas, tempered=tempered, traced=trace)
