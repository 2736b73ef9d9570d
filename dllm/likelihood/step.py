"""One read-only forward: what a model predicts at the undecided positions of a canvas."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import cache as caches
from ..core.canvas import IntArray
from ..core.errors import ConfigError, PromptError, check_whole
from ..engine.recipe import check_recipe
from ..kernels.statistics import token_statistics
from ..models.loader import remembered
from ..request.prompts import check_lengths_alone, encode, encode_holes
from .scoring import ScoreRequest, Scoring, forwards, recipe_of

MOST_TOP = 1000


@dataclass(frozen=True, eq=False)
class Guesses:
    """What is predicted at the holes of a canvas: ``positions`` (n,) int64 from the canvas's start,
    ``tokens`` (n, top) int64 from the most likely one on, and their natural ``logprobs`` (n, top)
    float32 among the whole vocabulary, at temperature 1."""

    positions: IntArray
    tokens: IntArray
    logprobs: Any


def step(
    model: Any, canvas: Any, *, prompt: Any = None, top: int = 5, cfg_scale: float = 0.0
) -> Guesses:
    """One forward of ``model`` over ``canvas``: nothing is decided, stored or taken back.

    ``canvas``: a text with ``[[8]]`` for a hole of 8 tokens, or token ids with -1 for undecided
    positions, after a ``prompt`` (as for `dllm.generate`), if there is one.  ``top``: how many
    tokens to list per position.  ``cfg_scale``: classifier-free guidance.  Samplers and training
    loops of others are written with it.
    """
    loaded = remembered(model)
    check_whole("top", top, most=MOST_TOP)
    if loaded.facts.mask_token_id is None:
        raise ConfigError(f"{loaded.name} is autoregressive: it predicts no masks")
    if loaded.facts.uniform:
        raise ConfigError(
            f"{loaded.name} has no masks to predict: what an undecided position holds is random"
        )
    check_lengths_alone(canvas, "a canvas of step")
    ids, holes, _ = encode_holes(loaded, canvas)
    before = np.zeros(0, np.int64) if prompt is None else encode(loaded, prompt)
    total, limit = len(before) + len(ids), loaded.facts.context_length
    if total > limit:
        raise PromptError(f"{total} tokens exceed the context of {limit}: shorten the canvas")
    how, wanted = Scoring(cfg_scale=cfg_scale), np.flatnonzero(holes)
    check_recipe(recipe_of(how), caches.compose("none"), loaded)
    ((_, hidden, head),) = forwards(loaded, [(ScoreRequest(before, ids), holes, wanted)], how)
    with torch.inference_mode():
        result = token_statistics(
            hidden, head, top=min(top, loaded.facts.vocab_size), needs=()
        ).numpy()
    assert result.top_token is not None and result.top_logprob is not None
    return Guesses(wanted, result.top_token, result.top_logprob)
