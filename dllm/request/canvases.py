"""The canvas of a request: how long it is, what it is made with, what is fixed in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.canvas import IntArray
from ..core.config import GenerationConfig
from ..core.errors import ConfigError, PromptError
from ..kernels.noise import uniform
from ..models import DiffusionModel
from .prompts import encode_continuation

DEFAULT_LENGTH = 128  # new tokens, where neither the call nor the checkpoint says how many


def fixed_ids(model: DiffusionModel, wanted: int | str) -> IntArray:
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


def check_apart(constraints: Sequence[tuple[int, IntArray]]) -> int:
    """Where the last of the constraints ends.  Raises where one stands in another's tokens."""
    end = 0
    for offset, tokens in sorted(constraints, key=lambda one: one[0]):
        if offset < end:
            raise ConfigError(
                f"the constraint at offset {offset} stands in the tokens of the one before it, "
                f"which end at {end}: move it, or join both texts"
            )
        end = offset + len(tokens)
    return end


def check_constraint(offset: int, tokens: IntArray, length: int) -> None:
    if offset + len(tokens) > length:
        raise ConfigError(
            f"the constraint of {len(tokens)} tokens at offset {offset} does not fit an answer of "
            f"{length} tokens: raise max_new_tokens"
        )


def canvas_facts(model: DiffusionModel, config: GenerationConfig) -> dict[str, Any]:
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
