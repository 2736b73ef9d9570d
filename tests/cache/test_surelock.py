"""SureLock locks what has come to rest, and what that costs is bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm import cache as caches
from dllm.core.canvas import Canvas
from dllm.core.config import GenerationConfig
from dllm.samplers import compose

from ..decoding import Decoding
from .test_every_pair import load

PROMPT, LENGTH, EPS = 7, 31, 0.1


def decode(name: str, spec: str) -> tuple[list[Any], list[np.ndarray], Canvas]:
    """Steps of one token each, the tokens that each step was fed, the row in the end."""
    model = load(name)
    sampler = compose("fixed", options={"eos_policy": "none", "block_length": 12})
    engine = Decoding(model, sampler, caches.compose(spec), GenerationConfig())
    assert model.facts.mask_token_id is not None
    canvas = Canvas.for_prompt(
        np.arange(PROMPT), LENGTH - PROMPT, mask_id=model.facts.mask_token_id, pad_id=0
    )
    (row,) = engine.open([canvas])
    steps, fed = [], [row.canvas.tokens.copy()]
    for (step,) in engine.resume([row]):
        steps.append(step)
        fed.append(row.canvas.tokens.copy())
    return steps, fed, row.canvas


def logprobs(name: str, tokens: np.ndarray) -> torch.Tensor:
    """(N, V) of a whole text, by the network itself; the mask is never proposed."""
    model = load(name)
    with torch.inference_mode():
        logits = model.hf(torch.from_numpy(tokens)[None]).logits[0].float()
    logits = logits.clone()
    logits[:, model.facts.mask_token_id] = -torch.inf
    return logits.log_softmax(-1)


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny"])
def test_the_first_rows_that_are_locked_are_those_at_rest(name: str) -> None:
    shift, mask = load(name).facts.logit_shift, load(name).facts.mask_token_id
    steps, fed, _ = decode(name, f"surelock(eps={EPS})")
    rows = np.arange(LENGTH - shift)
    for before, now, step in zip(fed, fed[1:], steps[2:], strict=False):
        first, second = logprobs(name, before), logprobs(name, now)  # nothing was locked yet
        moved = (second.exp() * (second - first)).nan_to_num(0).sum(-1).numpy()[rows]
        decided = (before[rows] != mask) & (now[rows + shift] != mask)
        locked = rows[decided & (moved < EPS)]
        assert step.plan.compute.tolist() == np.setdiff1d(np.arange(LENGTH), locked).tolist()
        if locked.size:
            break
    else:
        pytest.fail("nothing came to rest")
    # Pinsker: no probability of a locked row has moved by more.
    total = (second.exp() - first.exp()).abs().sum(-1).numpy()[locked] / 2
    assert (total <= np.sqrt(EPS / 2)).all()


def test_less_is_computed_the_more_may_rest() -> None:
    nano = dllm.load("nano")
    prompt = "Tom has 23 apples. Tom buys 12 more. Then Tom loses 7. How many apples does Tom have?"
    how = {"sampler": "llada", "max_new_tokens": 16, "block_length": 8}
    exact = dllm.generate(nano, prompt, **how)
    eased = [dllm.generate(nano, prompt, cache=f"surelock(eps={eps})", **how)
             for eps in (0, 1e-3, 1e-2)]  # fmt: skip
    assert eased[0].computed == exact.computed
    work = [result.computed for result in eased]
    assert work == sorted(work, reverse=True) and work[-1] < exact.computed / 2
    assert {result.text for result in eased} == {exact.text}
