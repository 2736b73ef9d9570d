"""`speculate` and `stream_speculate`: a verifier, a drafter, one prompt or many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
from transformers import PreTrainedModel

from ..canvas import IntArray
from ..config import ELSEWHERE, GenerationConfig
from ..errors import ConfigError, PromptError, UnknownNameError, short
from ..models import DiffusionModel, load
from ..models.checkpoint import BUNDLED
from ..prompts import ManyPrompts, OnePrompt, encode, is_batch
from ..streamers import Streamer, feeding
from ..text import GrowingText
from . import register_all
from .accept.defaults import own_processors
from .accept.rows import KeyedNoise, LogitsProcessor, Sampling
from .base import DRAFTERS, RULES, AcceptRule, Drafter, Request, single
from .length.control import CONTROLLERS, LengthController
from .loop import Batch, Speculation, StopCheck
from .result import SpeculativeResult
from .verifiers.base import can_verify
from .verifiers.packed import open_verifier

DEFAULT_LENGTH = 128  # new tokens, where neither the call nor the checkpoint says how many
ARGUMENTS = ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "stop_strings",
             "seed", "max_rows")  # fmt: skip
SESSION = ("rule", "controller", "repetition_penalty", "logits_processor", "exact")
DRAFTING = (
    "search",
    "proxy",
    "window",
    "steps",
    "sampler",
    "cache",
    "refresh_rounds",
    "end_marker",
    "marker_position",
    "trim",
    "head",
    "nodes",
)

DrafterLike = Any  # None, Drafter, model, hub id, folder, spec, or a list of these
VerifierLike = str | PreTrainedModel | DiffusionModel


@dataclass(frozen=True)
class RoundEvent:
    """One round of one text: of prompt ``row``, its ``round``-th.

    ``tokens`` were emitted, ``accepted`` of them drafted.  ``text``: what has become final; it is
    never taken back, and all pieces together are ``result.text``.  ``result`` is set on the text's
    last event.
    """

    row: int
    round: int
    tokens: list[int]
    accepted: int
    text: str
    result: SpeculativeResult | None = None


@overload
def speculate(
    verifier: VerifierLike, drafter: DrafterLike, prompt: ManyPrompts, **options: Any
) -> list[SpeculativeResult]: ...
@overload
def speculate(
    verifier: VerifierLike, drafter: DrafterLike, prompt: OnePrompt, **options: Any
) -> SpeculativeResult: ...


def speculate(
    verifier: VerifierLike,
    drafter: DrafterLike,
    prompt: Any,
    *,
    streamer: Streamer | None = None,
    **options: Any,
) -> Any:
    """Write with ``verifier``, several tokens per forward, without changing what it writes.

    ``verifier``: an autoregressive model: hub id, folder, transformers model or what `dllm.load`
    returns.  ``drafter``: a diffusion model (or anything `dllm.load` takes), the spec of a drafter
    such as ``"prompt_lookup"``, a `Drafter`, a list of these (the first one that has something to
    say drafts), or None: plain decoding with the same loop and the same noise.  ``prompt``: as for
    `dllm.generate`.  A list of prompts is a batch: every round verifies the drafts of all its texts
    in one packed forward, without padding, where the network's attention allows that, else text by
    text; each text comes out as if it had been alone.

    ``streamer`` (one prompt only) receives the prompt's ids, those of every round, and the end,
    as from ``generate`` of transformers.  ``options``:

    - ``rule``: how drafts are accepted.  "greedy" (default at temperature 0) and "keyed" (default
      above) give the same tokens as ``drafter=None``; "match", "point", "ratio", "block",
      "multi_round" and "traversal" give the same distribution.  "fly" and "pivot" are LOSSY.
    - ``controller``: how many tokens to draft, e.g. "rate" (default) or "fixed(k=8)".
    - for a diffusion drafter ``search`` (e.g. "cps"), ``proxy``, ``window`` (masks it sees),
      ``steps``, ``sampler``, ``cache``, ``refresh_rounds``, ``end_marker``, ``marker_position``,
      ``trim``; see `DiffusionDrafter`.
    - ``vocabulary``: "auto" refuses a model that uses other token ids than the verifier;
      "retokenize" and "intersect" bridge the difference.
    - ``max_new_tokens``, ``min_new_tokens``, ``temperature``, ``top_p``, ``top_k``,
      ``stop_strings``, ``seed`` and ``max_rows`` (texts written at a time) of
      `dllm.GenerationConfig`; ``repetition_penalty`` and ``logits_processor`` (transformers'
      callables), which act on the verifier's logits with the history that each row would have,
      as does everything of that kind in the verifier's ``generation_config``.
    - ``chat``: whether strings go through the chat template (default: when there is one);
      ``tokenizer``: of the verifier, if it is not its own.
    - ``exact`` (default True): in half precision on a CPU, score in a way that does not depend on
      how many tokens and texts are scored at once; docs/drafting.md says what is exact where.

    Returns a `SpeculativeResult`, or a list of them for a list of prompts.  Raises
    `dllm.DllmError` with one sentence that says what to do.  Several threads may call this with one
    verifier: their forwards take turns.
    """
    with feeding(streamer) as feed:
        session, prompts = _prepare(verifier, drafter, prompt, options)
        if feed is not None and len(prompts) > 1:
            raise ConfigError("a streamer follows one prompt: pass prompts one by one")
        results: list[Any] = [None] * len(prompts)
        if feed is not None:
            feed.begin(prompts[0])
        for row, run, tokens in session.rounds(prompts):
            if feed is not None:
                feed.give(tokens)
            if run.finish_reason is not None:
                results[row] = session.result(run)
    return results if is_batch(prompt) else results[0]


def stream_speculate(
    verifier: VerifierLike, drafter: DrafterLike, prompt: Any, **options: Any
) -> Iterator[RoundEvent]:
    """Like `speculate`, round by round: yields a `RoundEvent` per text and round.

    The iterator may be closed early: what still ran is dropped.
    """
    session, prompts = _prepare(verifier, drafter, prompt, options)
    return session.events(prompts)


def _prepare(
    verifier: VerifierLike, drafter: DrafterLike, prompt: Any, options: dict[str, Any]
) -> tuple[Session, list[IntArray]]:
    """Everything that can be wrong is found here, before the first round."""
    from .vocabulary import check_policy

    own = {name: options.pop(name) for name in SESSION if name in options}
    chat, vocabulary = options.pop("chat", None), options.pop("vocabulary", "auto")
    check_policy(vocabulary)
    model = load_verifier(verifier, options.pop("tokenizer", None))
    drafting = {name: options.pop(name) for name in DRAFTING if name in options}
    config = _config(model, options)
    part = fit(make_drafter(drafter, **drafting), model, vocabulary)
    session = Session(model, part, config, **own)
    prompts = list(prompt) if is_batch(prompt) else [prompt]
    if not prompts:
        raise PromptError("there is no prompt: pass a string, messages, ids, or a list of them")
    encoded = [encode(model, one, chat) for one in prompts]
    for ids in encoded:
        session.room(len(ids))
    return session, encoded


def load_verifier(verifier: VerifierLike, tokenizer: Any = None) -> DiffusionModel:
    """The verifier, loaded.  Raises `ConfigError` when it is a diffusion model."""
    model = load(verifier, tokenizer=tokenizer) if tokenizer is not None else load(verifier)
    if not can_verify(model):
        raise ConfigError(
            f"{model.name} is a diffusion model: it drafts, but cannot verify; "
            "pass an autoregressive model as the verifier"
        )
    return model


def make_drafter(drafter: DrafterLike, **options: Any) -> Drafter | None:
    """A `Drafter` from whatever `speculate` takes; ``options`` are those of diffusion drafters."""
    from .dflash.checkpoint import is_block_drafter
    from .dflash.drafter import make_block_drafter
    from .drafters.diffusion import DiffusionDrafter
    from .drafters.first_of import FirstOf

    register_all()
    if isinstance(drafter, list | tuple):
        models = [one for one in drafter if _names_model(one)]
        parts = [make_drafter(one, **(options if _names_model(one) else {})) for one in drafter]
        if options and not models:
            raise ConfigError(f"{next(iter(options))} is for diffusion drafters: name one")
        return FirstOf(tuple(part for part in parts if part is not None))
    if options and not _names_model(drafter):
        raise ConfigError(
            f"{next(iter(options))} is for diffusion drafters named by model: leave it out, or set "
            "it on the DiffusionDrafter"
        )
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    if isinstance(drafter, str) and is_drafter_spec(drafter):
        return single(drafter, DRAFTERS, Drafter)
    if is_block_drafter(drafter):
        return make_block_drafter(drafter, options)
    return DiffusionDrafter(load(drafter), **options)


def _names_model(drafter: DrafterLike) -> bool:
    """Whether a single drafter is given as a diffusion model or its name."""
    if isinstance(drafter, str):
        return not is_drafter_spec(drafter)
    return drafter is not None and not isinstance(drafter, Drafter)


def fit(drafter: Drafter | None, verifier: DiffusionModel, vocabulary: str) -> Drafter | None:
    """``drafter`` with every diffusion model in it made fit for the verifier's token ids."""
    from .drafters.diffusion import DiffusionDrafter
    from .vocabulary import reconcile

    if isinstance(drafter, DiffusionDrafter):
        return reconcile(drafter, drafter.model, verifier, vocabulary)
    inner = getattr(drafter, "drafters", None)
    if drafter is None or inner is None:
        return drafter
    fitted = tuple(fit(one, verifier, vocabulary) for one in inner)
    return replace(drafter, drafters=fitted)  # type: ignore[call-arg]


def is_drafter_spec(name: str) -> bool:
    """Whether ``name`` is the spec of a registered drafter, not the name of a model.

    Raises `UnknownNameError` for what is neither, but nearly the name of a drafter.
    """
    register_all()
    start = name.split("(")[0].strip()
    if start in DRAFTERS or start in BUNDLED or "/" in start or Path(start).exists():
        return start in DRAFTERS
    if get_close_matches(start, list(DRAFTERS), cutoff=0.75):
        raise UnknownNameError("drafter", start, DRAFTERS)
    return False


def _config(model: DiffusionModel, arguments: dict[str, Any]) -> GenerationConfig:
    for name in arguments:
        if name not in ARGUMENTS:
            known = {*ARGUMENTS, *DRAFTING, *SESSION, "chat", "tokenizer", "vocabulary"}
            here = ELSEWHERE.get(name.lower(), "")
            raise UnknownNameError(
                "argument of speculate", name, known, here if here.split(":")[0] in known else None
            )
    defaults = {k: v for k, v in model.generation_defaults.items() if k in ARGUMENTS}
    config = GenerationConfig.build(defaults, arguments)
    limit = config.max_new_tokens or DEFAULT_LENGTH
    config.check_used(arguments, canvas=limit, tempered=False, traced=False)
    return config


class Session:
    """Verifier, drafter and settings of one call."""

    def __init__(
        self,
        model: DiffusionModel,
        drafter: Drafter | None,
        config: GenerationConfig,
        rule: str | AcceptRule | None = None,
        controller: str | LengthController | None = None,
        repetition_penalty: float | None = None,
        logits_processor: Sequence[LogitsProcessor] = (),
        exact: bool = True,
        own_defaults: bool = True,
    ) -> None:
        register_all()
        if repetition_penalty is not None and not (
            isinstance(repetition_penalty, int | float) and repetition_penalty > 0
        ):
            penalty = short(repetition_penalty)
            raise ConfigError(f"repetition_penalty must be a number above 0, not {penalty}")
        if not isinstance(logits_processor, Sequence) or not all(map(callable, logits_processor)):
            raise ConfigError(
                "logits_processor is a list of callables, as transformers has them, not "
                f"{short(logits_processor)}"
            )
        self.model, self.drafter, self.config = model, drafter, config
        self.rule = single(rule or ("keyed" if config.temperature else "greedy"), RULES, AcceptRule)
        if self.rule.name == "greedy" and config.temperature:
            raise ConfigError("rule 'greedy' is for temperature 0: use 'keyed' or 'match'")
        self.controller = single(controller or "rate", CONTROLLERS, LengthController)
        self.repetition_penalty = repetition_penalty
        self.processors, self.own_defaults = tuple(logits_processor), own_defaults
        if drafter is not None and not drafter.distributions & self.rule.accepts:
            self.rule.check(next(iter(drafter.distributions)), False)
        self.verifier = open_verifier(model, drafter.taps if drafter is not None else (), exact)

    def rounds(self, prompts: Sequence[IntArray]) -> Iterator[tuple[int, Speculation, list[int]]]:
        """Write answers to all prompts: (index of the prompt, its text, what it got) as they come.

        Equal prompts get different noise, in order.
        """
        seen: dict[bytes, int] = {}
        index: dict[int, int] = {}  # of a running text -> of its prompt
        starts: list[Callable[[], Speculation]] = []

        def start(at: int, prompt: IntArray, row: int) -> Speculation:
            run = self.start(prompt, row)
            index[id(run)] = at
            return run

        for at, prompt in enumerate(prompts):
            row = seen.get(prompt.tobytes(), 0)
            seen[prompt.tobytes()] = row + 1
            starts.append(partial(start, at, prompt, row))
        batch = Batch(self.verifier, self.drafter, starts, min(self.config.max_rows, len(prompts)))
        for pairs in batch.run():
            for run, tokens in pairs:
                yield index[id(run)], run, tokens

    def events(self, prompts: Sequence[IntArray]) -> Iterator[RoundEvent]:
        """See `stream_speculate`."""
        tokenizer: Any = self.model.tokenizer
        decode = partial(tokenizer.decode, skip_special_tokens=True) if tokenizer else lambda _: ""
        growing = [GrowingText(decode, self.config.stop_strings) for _ in prompts]
        for row, run, tokens in self.rounds(prompts):
            text, result = growing[row].feed(tokens), None
            if run.finish_reason is not None:
                result = self.result(run)
                text += growing[row].end(result.text)
            done = len(run.rounds) - 1
            yield RoundEvent(row, done, tokens, run.rounds[done].accepted, text, result)

    def start(self, prompt: IntArray, row: int = 0) -> Speculation:
        """A text, ready for its first round."""
        model, config = self.model, self.config
        limit = len(prompt) + self.room(len(prompt))
        coins = KeyedNoise(config.seed, row)
        request = Request(
            prompt=prompt, vocab_size=model.facts.vocab_size, limit=limit,
            stop_ids=model.facts.stop_token_ids, temperature=config.temperature,
            noise_key=coins.emission, draft_key=coins.drafting, tokenizer=model.tokenizer,
            name=model.name, trees=self.verifier.trees and self.rule.trees, verifier=model,
        )  # fmt: skip
        penalty, processors = self.repetition_penalty, self.processors
        if self.own_defaults:
            given = () if penalty is None else ("repetition_penalty",)
            processors = (*own_processors(model, prompt, limit, given), *processors)
        sampling = Sampling(
            config.temperature, config.top_p, config.top_k, 1.0 if penalty is None else penalty,
            processors, model.facts.stop_token_ids, len(prompt) + config.min_new_tokens,
        )  # fmt: skip
        return Speculation(
            self.verifier, self.verifier.open(prompt, limit),
            self.drafter.open(request) if self.drafter is not None else None,
            self.controller.fresh(), self.rule, sampling, coins,
            model.facts.stop_token_ids, self._stop_check(),
        )  # fmt: skip

    def alone(self, run: Speculation) -> Iterator[list[int]]:
        """Write one started text to its end; yields the tokens of every round."""
        for pairs in Batch(self.verifier, self.drafter, [lambda: run]).run():
            yield pairs[0][1]

    def room(self, prompt: int) -> int:
        """New tokens that a prompt of that length leaves room for."""
        context, wanted = self.model.facts.context_length, self.config.max_new_tokens
        if prompt >= context:
            raise PromptError(
                f"the prompt has {prompt} tokens, the context {context}: shorten it by at least "
                f"{prompt - context + 1}"
            )
        if wanted is None:
            return min(DEFAULT_LENGTH, context - prompt)
        if prompt + wanted > context:
            raise PromptError(
                f"{prompt} prompt tokens and {wanted} new ones exceed the context of {context}: "
                f"shorten the prompt or pass max_new_tokens={context - prompt}"
            )
        return wanted

    def _stop_check(self) -> StopCheck | None:
        strings, tokenizer = self.config.stop_strings, self.model.tokenizer
        if not strings:
            return None
        if tokenizer is None:
            raise ConfigError(f"{self.model.name} came without a tokenizer: it has no stop_strings")
        return lambda ids: any(stop in str(tokenizer.decode(ids)) for stop in strings)

    def result(self, run: Speculation) -> SpeculativeResult:
        """What a sequence has become."""
        tokens, tokenizer = run.tokens, self.model.tokenizer
        text = "" if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))
        outcome = [text.index(stop) for stop in self.config.stop_strings if stop in text]
        return SpeculativeResult(
            text=text[: min(outcome)] if outcome else text,
            tokens=tokens,
            sequences=run.text.prefix,
            prompt_length=run.prompt_length,
            nfe=run.text.forwards,
            computed=run.text.computed,
            forced=0,
            order=run.order,
            logprobs=np.asarray(run.logprobs, np.float32),
            finish_reason=run.finish_reason or "length",
            seconds=run.seconds,
            peak_memory=run.memory.peak(),
            sampler=self.rule.name,
            cache="verifier",
            seed=self.config.seed,
            rounds=run.rounds,
            drafter="none" if self.drafter is None else repr(self.drafter),
            rule=self.rule.name,
            lossy=self.rule.lossy,
        )


assert set(ARGUMENTS) <= {field.name for field in fields(GenerationConfig)}
