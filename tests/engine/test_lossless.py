"""FreeDave writes exactly what its base sampler writes, in the same cache regime."""

from __future__ import annotations

import pytest

import dllm
from dllm.eval.tasks import TASKS

KINDS = ["fact", "sort", "insert", "remove_random", "insert_random"]


def check(count: int, base: str, cache: str) -> tuple[int, int]:
    """Compare ``count`` held-out prompts; forwards of the base and of FreeDave."""
    prompts = [e.prompt for task in KINDS for e in TASKS[task].examples(count // len(KINDS))]
    slow, fast = 0, 0
    for i in range(0, len(prompts), 50):
        how = {"cache": cache, "max_new_tokens": 32, "block_length": 16}
        plain = dllm.generate("nano", prompts[i : i + 50], sampler=base, **how)
        found = dllm.generate("nano", prompts[i : i + 50], sampler=f"freedave({base})", **how)
        assert [r.tokens for r in found] == [r.tokens for r in plain]
        slow, fast = slow + sum(r.nfe for r in plain), fast + sum(r.nfe for r in found)
    return slow, fast


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_freedave_is_lossless(cache: str) -> None:
    slow, fast = check(10, "fixed", cache)
    assert fast < 0.5 * slow


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("base", ["fixed", "threshold(0.95)", "localleap"])
def test_freedave_is_lossless_on_500_prompts(base: str, cache: str) -> None:
    slow, fast = check(500, base, cache)
    print(f"{base} {cache}: {slow} forwards, {fast} with drafts")
    assert fast <= slow
