"""How likely a model finds each token of a text, in reading order."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.canvas import FloatArray, IntArray
from ..core.errors import PromptError
from ..kernels.statistics import token_statistics
from ..models import DiffusionModel
from .scoring import ScoreRequest, Scoring, forwards, own_logits


@dataclass(frozen=True)
class TokenScores:
    """The chain rule, position by position: ``tokens`` (n,) int64 of a text and their natural
    ``logprobs`` (n,) float32, given those before; ``top_tokens`` and ``top_logprobs`` (n, top) of
    the most likely ones.  An autoregressive model's first token has no distribution: nan."""

    tokens: IntArray
    logprobs: FloatArray
    top_tokens: IntArray
    top_logprobs: FloatArray


def token_scores(model: DiffusionModel, ids: IntArray, top: int, how: Scoring) -> TokenScores:
    """Scores of the tokens ``ids`` (n,).

    A diffusion model is asked once per token, with what follows masked: the estimator
    "left_to_right" of `dllm.score`, whose sum over any part of the text is that part's likelihood
    given what stands before it.  An autoregressive one takes one forward.
    """
    if len(ids) > model.facts.context_length:
        raise PromptError(
            f"the text has {len(ids)} tokens, the context {model.facts.context_length}: shorten it"
        )
    causal = model.facts.mask_token_id is None
    own, tokens, logprobs, at = [], [], [], 0
    with torch.inference_mode():
        if causal:
            how.go_on()
            logits = own_logits(model, ids, len(ids))
            # The first token has no distribution: a row in its place.
            parts: Iterable[tuple[Any, Any]] = (logits[-1:], None), (logits[:-1], None)
        else:
            request, every = ScoreRequest(ids[:0], ids), np.arange(len(ids))
            rows = ((request, every >= place, every[place : place + 1]) for place in every)
            parts = ((hidden, head) for _, hidden, head in forwards(model, rows, how))
        for hidden, head in parts:
            select = torch.from_numpy(ids[at : at + len(hidden)]).to(model.device)
            at += len(hidden)
            result = token_statistics(
                hidden, head, select=select, top=min(max(1, top), model.facts.vocab_size), needs=()
            ).numpy()
            assert result.select_logprob is not None
            assert result.top_token is not None and result.top_logprob is not None
            own.append(result.select_logprob)
            tokens.append(result.top_token)
            logprobs.append(result.top_logprob)
    scores = np.concatenate(own), np.concatenate(tokens), np.concatenate(logprobs)
    if causal:
        scores[0][0] = scores[2][0] = np.nan
    return TokenScores(ids, *scores)
