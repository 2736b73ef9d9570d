"""The two kinds of noise, end to end: what every change of the engine has to leave as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import dllm

PROMPTS = ["Reverse this list: Tom, Anna, Ben", "Sort these names: Tom, Anna, Ben"]
UNIFORM = str(Path(__file__).parents[2] / "examples" / "nano-uniform")


@pytest.mark.parametrize(
    ("model", "sampler", "caches"),
    [
        ("nano", "threshold", ("none", "dual(refresh_every=1)")),
        (UNIFORM, "threshold", ("none", "block")),
        (UNIFORM, "entropy_bound", ("none", "block")),
    ],
)
def test_answers_are_right_with_and_without_a_cache(
    model: str, sampler: str, caches: tuple[str, str]
) -> None:
    loaded = dllm.load(model, dtype="float32")
    plain, cached = (
        dllm.generate(loaded, PROMPTS, sampler=sampler, cache=cache, max_new_tokens=32)
        for cache in caches
    )
    assert plain[0].text == "Ben, Anna, Tom"
    assert [result.tokens for result in plain] == [result.tokens for result in cached]
    for prompt, result in zip(PROMPTS, plain, strict=True):
        alone = dllm.generate(loaded, prompt, sampler=sampler, cache=caches[0], max_new_tokens=32)
        assert (alone.tokens, alone.nfe) == (result.tokens, result.nfe)
