"""How likely a model finds a text: a bound with its standard error, for many requests at once."""

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from ..core.canvas import IntArray
from ..core.errors import PromptError
from ..core.spec import build
from ..models import DiffusionModel
from ..models.loader import remembered
from ..request.prompts import (
    ManyPrompts,
    OnePrompt,
    check_ids,
    encode,
    encode_continuation,
    encode_text,
    is_batch,
    tokenizer_of,
)
from .scoring import Score, ScoreRequest, Scoring, score_requests


@overload
def score(
    model: Any, prompt: ManyPrompts, continuation: ManyPrompts | OnePrompt, *,
    chat: bool | None = None, **how: Any,
) -> list[Score]: ...  # fmt: skip
@overload
def score(
    model: Any, prompt: OnePrompt | None, continuation: ManyPrompts, *, chat: bool | None = None,
    **how: Any,
) -> list[Score]: ...  # fmt: skip
@overload
def score(
    model: Any, prompt: OnePrompt | None, continuation: OnePrompt, *, chat: bool | None = None,
    **how: Any,
) -> Score: ...  # fmt: skip
def score(
    model: Any, prompt: Any, continuation: Any, *, chat: bool | None = None, **how: Any
) -> Any:
    """A lower bound of log p(continuation | prompt), with its standard error, as a `Score`.

    ``prompt``: as for `dllm.generate`, or empty or None; ``continuation``: text or ids.  Lists of
    either are scored together and give a list; one prompt with several continuations compares
    choices.  ``estimator``: "stratified" (default: unbiased, and exact where the continuation has
    few tokens; block by block where attention is causal between blocks), "llada" and "dream"
    (those of the official evaluations), "left_to_right" and "right_to_left" (chain rule).
    ``samples`` (default 128): forwards per request.  ``greedy``: also find out whether greedy
    decoding writes the continuation.  ``early_stop``: of several continuations of one prompt, stop
    once the best is ahead by 3 standard errors; the estimates are then rougher.  ``cfg_scale``:
    classifier-free guidance.  ``seed``: of the masks; the result does not depend on the batch.
    ``max_batch_tokens``: token positions per forward.  ``before_forward``: called before every
    forward; what it raises ends the call.

    An autoregressive model is scored exactly, in one forward per request, and so is a WeDLM model,
    which is one as well, unless an ``estimator`` is named.  The texts of chat prompts are a turn of
    their own; other texts continue the prompt, so a blank between them belongs to the continuation.
    """
    loaded = remembered(model)
    settings = build(Scoring, how)
    prompts = list(prompt) if is_batch(prompt) else [prompt]
    texts = list(continuation) if is_batch(continuation) else [continuation]
    if len(prompts) != len(texts):
        if 1 not in (len(prompts), len(texts)):
            raise PromptError(f"{len(prompts)} prompts do not go with {len(texts)} continuations")
        count = max(len(prompts), len(texts))
        prompts, texts = prompts * (count // len(prompts)), texts * (count // len(texts))
    requests: list[ScoreRequest] = []
    groups: dict[bytes, int] = {}
    for given, text in zip(prompts, texts, strict=True):
        ids = _prompt_ids(loaded, given, chat)
        turn = _is_turn(loaded, given, chat)
        index = groups.setdefault(ids.tobytes(), len(groups))
        requests.append(ScoreRequest(ids, _continuation_ids(loaded, text, turn), index))
    result = score_requests(loaded, requests, settings)
    return result if is_batch(prompt) or is_batch(continuation) else result[0]


def _prompt_ids(model: DiffusionModel, prompt: Any, chat: bool | None) -> IntArray:
    sized = hasattr(prompt, "__len__") and getattr(prompt, "ndim", 1) > 0
    if prompt is None or (sized and not len(prompt)):
        return np.zeros(0, np.int64)
    return encode(model, prompt, chat)


def _is_turn(model: DiffusionModel, prompt: Any, chat: bool | None) -> bool:
    """Whether the prompt ends where the assistant begins to speak."""
    if isinstance(prompt, str):
        has_template = model.tokenizer is not None and bool(model.tokenizer.chat_template)
        return bool(prompt) and (has_template if chat is None else chat)
    messages = [prompt] if isinstance(prompt, Mapping) else prompt
    return isinstance(messages, Sequence) and isinstance(next(iter(messages), None), Mapping)


def _continuation_ids(model: DiffusionModel, text: Any, turn: bool) -> IntArray:
    if isinstance(text, str):
        tokenizer = tokenizer_of(model, "pass token ids")
        ids = (encode_text if turn else encode_continuation)(tokenizer, text)
    else:
        ids = _prompt_ids(model, text, None).tolist()
    if not ids:
        raise PromptError("the continuation is empty: there is nothing to score")
    return check_ids(model, ids)
