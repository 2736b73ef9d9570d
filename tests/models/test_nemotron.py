"""Nemotron-Labs-Diffusion decodes as its own sampler does: a loop over transformers' network."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import dllm

from ..thin import some
from .test_families import CASES, MASK, write

BLOCK = 32
CASE = next(case for case in CASES if case.family == "nemotron")


@torch.no_grad()
def own(network: Any, prompt: list[int], blocks: int, tau: float) -> tuple[list[int], int, int]:
    """Its generate at temperature 0: the tokens, and forwards of blocks and over what is finished.

    The text is read causally, from the beginning each time; its last logits give the first token of
    the next block, which then sees all of the text and itself.
    """
    text, inner, outer = [*prompt], 0, 0
    for _ in range(blocks):
        size = len(text)
        logits = network(torch.tensor([text]), use_cache=False).logits
        logits[..., MASK] = -torch.inf
        outer += 1
        block = [int(logits[0, -1].argmax()), *[MASK] * (BLOCK - 1)]
        seen = torch.ones(size + BLOCK, size + BLOCK, dtype=torch.bool)
        seen[:size] = torch.ones(size, size + BLOCK, dtype=torch.bool).tril()
        while MASK in block:
            hidden = torch.zeros(1, 1, *seen.shape).masked_fill(~seen, -torch.inf)
            logits = network(
                torch.tensor([[*text, *block]]), attention_mask=hidden, use_cache=False
            ).logits[0, size:].float()  # fmt: skip
            logits[:, MASK] = -torch.inf
            sure, token = logits.softmax(-1).max(-1)
            masked = torch.tensor(block) == MASK
            sure[~masked] = -1
            chosen = (sure >= tau) & masked
            chosen[sure.argmax()] = True
            block = [
                int(t) if c else b for b, t, c in zip(block, token, chosen, strict=True)
            ]  # fmt: skip
            inner += 1
        text += block
    return text[len(prompt) :], inner, outer


@pytest.mark.parametrize(("kept", "tau"), some(product(["block", "none"], [0.05, 0.9]), 2))
def test_it_decodes_as_its_own_sampler(tmp_path: Path, kept: str, tau: float) -> None:
    network = write(tmp_path, CASE)
    model = dllm.load(tmp_path, **dict(CASE.given))
    prompts = [[5, 9, 17, 40, 3], [*range(1, 40)], [7, 8]]
    results = dllm.generate(
        model, prompts, sampler=f"threshold(tau={tau})", cache=kept, max_new_tokens=2 * BLOCK,
        eos_policy="none",
    )  # fmt: skip
    for prompt, result in zip(prompts, results, strict=True):
        tokens, inner, outer = own(network, prompt, 2, tau)
        assert result.sequences[len(prompt) :].tolist() == tokens
        assert result.nfe == inner + outer
        alone = dllm.generate(
            model, prompt, sampler=f"threshold(tau={tau})", cache=kept, max_new_tokens=2 * BLOCK,
            eos_policy="none",
        )  # fmt: skip
        assert (alone.tokens, alone.nfe, alone.order) == (result.tokens, result.nfe, result.order)


@pytest.mark.slow
def test_a_prefix_is_reused(tmp_path: Path) -> None:
    """The second turn goes on from what the first has read, to the same text."""
    write(tmp_path, CASE)
    model = dllm.load(tmp_path, **dict(CASE.given))
    how: Any = {"max_new_tokens": 2 * BLOCK, "eos_policy": "none"}
    with dllm.Session(model, cache="block", prefix_cache_tokens=1_000) as session:
        first = session.submit([*range(1, 40)], **how).result()
        turn = [*range(1, 40), *first.tokens, 5, 6]
        second = session.submit(turn, **how).result()
    assert second.cached_tokens == 39 + BLOCK  # the last block was not read
    assert second.tokens == dllm.generate(model, turn, **how).tokens
