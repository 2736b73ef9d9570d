"""Drafting inside the generate of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import dllm
from dllm.drafting.bridges.transformers import custom_generate

from ..conftest import Scripted, make_verifier, prompts

NEW = 16


def theirs(model: dllm.DiffusionModel, prompt: list[int], **how: Any) -> list[int]:
    ids, hf = torch.tensor([prompt]), model.hf
    how = {"max_new_tokens": NEW, "do_sample": False} | how
    out: Any = hf.generate(ids, attention_mask=torch.ones_like(ids), **how)  # type: ignore[operator]
    result: list[int] = out[0].tolist()
    return result


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_custom_generate_is_greedy_generation(verifier: dllm.DiffusionModel, tree: bool) -> None:
    for i, prompt in enumerate(prompts(3)):
        how: dict[str, Any] = {"repetition_penalty": 1.3} if i else {}
        expected, rounds = theirs(verifier, prompt, **how), []
        drafter = Scripted(expected, k=4, noise=0.2, tree=tree, seed=i)
        result = theirs(
            verifier, prompt, custom_generate=custom_generate, drafter=drafter,
            controller="fixed(k=4)", on_tokens=rounds.append, **how,
        )  # fmt: skip
        assert result == expected
        assert len(rounds) < NEW
        assert [token for tokens in rounds for token in tokens] == expected[len(prompt) :]


def test_custom_generate_samples_as_speculate_does(verifier: dllm.DiffusionModel) -> None:
    (prompt,) = prompts(1)
    how: dict[str, Any] = {
        "do_sample": True, "temperature": 0.7, "top_k": 20, "custom_generate": custom_generate,
        "seed": 5,
    }  # fmt: skip
    plain = theirs(verifier, prompt, **how)
    assert theirs(verifier, prompt, drafter=Scripted(plain, k=3), **how) == plain
    ours = dllm.speculate(
        verifier, None, prompt, temperature=0.7, top_k=20, seed=5, max_new_tokens=NEW
    )
    assert ours.tokens == plain[len(prompt) :]


def test_bridges_compare_vocabularies(verifier: dllm.DiffusionModel) -> None:
    """As `speculate` does: with tokenizers by what ids mean, without by size."""
    other = make_verifier("full", vocab_size=600)
    nano = dllm.load("nano")
    with pytest.raises(dllm.ConfigError, match="ids"):
        theirs(other, [5, 6, 7], custom_generate=custom_generate, drafter=nano)


def test_custom_generate_returns_what_was_asked_for(verifier: dllm.DiffusionModel) -> None:
    ids = torch.tensor([[5, 9, 33, 7]])
    how: dict[str, Any] = {
        "custom_generate": custom_generate, "drafter": "prompt_lookup", "max_new_tokens": 4,
        "do_sample": False, "return_dict_in_generate": True,
    }  # fmt: skip
    hf: Any = verifier.hf
    assert hf.generate(ids, **how).sequences[0].tolist() == theirs(
        verifier, ids[0].tolist(), max_new_tokens=4
    )
    with pytest.raises(dllm.ConfigError, match="output_scores"):
        hf.generate(ids, output_scores=True, **how)


def test_bridges_refuse_what_they_cannot_do(verifier: dllm.DiffusionModel) -> None:
    config = GenerationConfig(max_length=9)
    with pytest.raises(dllm.ConfigError, match="one sequence"):
        custom_generate(verifier.hf, torch.ones(2, 3, dtype=torch.long), generation_config=config)
    with pytest.raises(dllm.ConfigError, match="padding"):
        custom_generate(
            verifier.hf, torch.ones(1, 3, dtype=torch.long), generation_config=config,
            attention_mask=torch.tensor([[0, 1, 1]]),
        )  # fmt: skip
