"""The two kinds of noise, end to end: what every change of the engine has to leave as it is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def test_answers_come_before_all_prompts_are_there(tiny: dllm.DiffusionModel) -> None:
    """And are those of a list, also where prompts are equal and noise is drawn."""
    how: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.9, "seed": 2, "max_batch_size": 2}
    prompts = [[5, 6, 7 + i % 3] for i in range(10)]
    taken = list[int]()

    def arriving() -> Iterator[list[int]]:
        for i, prompt in enumerate(prompts):
            taken.append(i)
            yield prompt

    answers = dllm.as_completed(tiny, arriving(), cache="prefix", **how)
    first, result = next(answers)
    assert len(taken) < len(prompts)
    found = {first: result, **dict(answers)}
    expected = dllm.generate(tiny, prompts, cache="prefix", **how)
    assert [found[i].tokens for i in range(len(prompts))] == [r.tokens for r in expected]
    assert not list(dllm.as_completed(tiny, iter([])))
