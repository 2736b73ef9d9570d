"""`speculate` and `stream_speculate`: a verifier, a drafter, one prompt or many."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, overload

from ..core.errors import ConfigError, check_switch
from ..request.prompts import ManyPrompts, OnePrompt, is_batch
from ..request.requests import requests_for
from ..runtime.events import Event
from ..runtime.scheduler import Scheduler
from ..runtime.streamers import Streamer, feeding
from .engine import engine_for
from .naming import DrafterLike, VerifierLike, check_vocabulary, fit, load_verifier, make_drafter
from .recipe import DRAFTING, SETTINGS, recipe_for
from .result import SpeculativeResult


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
    such as ``"prompt_lookup"``, a `Drafter`, a list of these (tried in order; the first non-empty
    draft is used), or None: plain decoding with the same loop and the same noise.  ``prompt``: as
    for `dllm.generate`.  A list of prompts is a batch: every round verifies the drafts of all its
    texts in one packed forward, without padding, where the network's attention allows that, else
    text by text; each text comes out as if it had been alone.

    ``streamer`` (one prompt only) receives the prompt's ids, those of every round, and the end,
    as from ``generate`` of transformers.  ``options``:

    - ``rule``: how drafts are accepted.  "greedy" (default at temperature 0) and "keyed" (default
      above) give the same tokens as ``drafter=None``; "ratio" and "block" give the same
      distribution.  "apd" is LOSSY.
    - ``controller``: how many tokens to draft, e.g. "adaptive" (default) or "fixed(k=8)".
    - for a diffusion drafter ``search`` (e.g. "cps"), ``window`` (masks it sees), ``cache``,
      ``refresh_rounds``, ``end_marker``, see `DiffusionDrafter`; for a block drafter ``head``,
      ``nodes`` and ``ngram_candidates``, see `BlockDrafter`.
    - ``vocabulary``: "auto" refuses a model that uses other token ids than the verifier;
      "retokenize" carries drafts over as text.
    - ``max_new_tokens``, ``min_new_tokens``, ``temperature``, ``top_p``, ``top_k``,
      ``stop_strings``, ``seed`` and ``max_batch_size`` (texts written at a time) of
      `dllm.GenerationConfig`; ``repetition_penalty`` and ``logits_processor`` (transformers'
      callables), which act on the verifier's logits with the history that each row would have,
      as does everything of that kind in the verifier's ``generation_config``.
    - ``chat``: whether strings go through the chat template (default: when there is one);
      ``tokenizer``: of the verifier, if it is not its own.
    - ``exact`` (default True): in half precision on a CPU, score in a way that does not depend on
      how many tokens and texts are scored at once; see docs/reference/drafting.md.

    Returns a `SpeculativeResult`, or a list of them for a list of prompts.  Raises
    `dllm.DllmError` with one sentence that says what to do.  Several threads may call this with one
    verifier: their forwards take turns.
    """
    with nullcontext() if streamer is None else feeding(streamer) as take:
        scheduler = _scheduler(verifier, drafter, prompt, options)
        if take is not None and len(scheduler.waiting) > 1:
            raise ConfigError("a streamer follows one prompt: pass prompts one by one")
        results = scheduler.completed(take)
    return results if is_batch(prompt) else results[0]


def stream_speculate(
    verifier: VerifierLike, drafter: DrafterLike, prompt: Any, **options: Any
) -> Iterator[Event]:
    """Like `speculate`, round by round: yields an `Event` per text and round, whose ``tokens`` were
    emitted, ``accepted`` of them drafted.

    The iterator may be closed early: what still ran is dropped.
    """
    return _scheduler(verifier, drafter, prompt, options).events()


def _scheduler(
    verifier: VerifierLike, drafter: DrafterLike, prompt: Any, options: dict[str, Any]
) -> Scheduler:
    """Everything that can be wrong is found here, before the first round."""
    own = {name: options.pop(name) for name in SETTINGS if name in options}
    exact = options.pop("exact", True)
    check_switch("exact", exact)
    chat, vocabulary = options.pop("chat", None), options.pop("vocabulary", "auto")
    check_vocabulary(vocabulary)
    model = load_verifier(verifier, options.pop("tokenizer", None))
    drafting = {name: options.pop(name) for name in DRAFTING if name in options}
    part = fit(make_drafter(drafter, **drafting), model, vocabulary)
    recipe = recipe_for(model, part, None, options, **own)
    requests = requests_for(model, recipe, list(prompt) if is_batch(prompt) else [prompt], chat)
    return Scheduler.of(engine_for(model, requests, exact), requests)
