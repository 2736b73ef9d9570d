"""FreeDave writes exactly what its base sampler writes, in the same cache regime."""

import pytest

import dllm
from dllm.core.errors import ConfigError
from dllm.eval.tasks import TASKS
from dllm.samplers import compose

from ..thin import some

KINDS = ["fact", "sort", "insert", "remove_random", "insert_random"]


def check(count: int, base: str, cache: str) -> tuple[int, int]:
    """Compare ``count`` held-out prompts; forwards of the base and of FreeDave."""
    prompts = [e.prompt for task in KINDS for e in TASKS[task].examples(count // len(KINDS))]
    slow, fast = 0, 0
    for i in range(0, len(prompts), 50):
        how = {"cache": cache, "max_new_tokens": 32, "block_length": 16}
        plain = dllm.generate("nano", prompts[i : i + 50], sampler=base, **how)
        result = dllm.generate("nano", prompts[i : i + 50], sampler=f"freedave({base})", **how)
        assert [r.tokens for r in result] == [r.tokens for r in plain]
        slow, fast = slow + sum(r.nfe for r in plain), fast + sum(r.nfe for r in result)
    return slow, fast


@pytest.mark.parametrize("cache", some(["dual", "none"], 1))
def test_freedave_is_lossless(cache: str) -> None:
    slow, fast = check(5, "fixed", cache)
    assert fast < 0.5 * slow


BASES = ["fixed", "threshold(0.95)"]
WINDOWS = ["blocks(4)", "whole", "adablock(4)", "dcd(s_init=4)+eos", "dsb(4)", "dsb(4, k_max=3)",
           "dcd(s_init=3, block_length=5)+eos", "multi_blocks(4)"]  # fmt: skip


@pytest.mark.parametrize(
    ("window", "base", "count"),
    some([(window, BASES[i % 2], 1) for i, window in enumerate(WINDOWS)], 1),
)
def test_freedave_is_lossless_in_every_window(window: str, base: str, count: int) -> None:
    prompts = [
        e.prompt for t in ("insert_random", "latin")[:count] for e in TASKS[t].examples(count)
    ]
    plain = dllm.generate("nano", prompts, sampler=f"{base}+{window}", max_new_tokens=16)
    result = dllm.generate("nano", prompts, sampler=f"freedave({base})+{window}", max_new_tokens=16)
    assert [r.tokens for r in result] == [r.tokens for r in plain]
    assert sum(r.nfe for r in result) < sum(r.nfe for r in plain)


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("window", WINDOWS)
def test_freedave_is_lossless_in_every_window_on_more_prompts(window: str, base: str) -> None:
    test_freedave_is_lossless_in_every_window(window, base, 6)


@pytest.mark.parametrize("window", ["staged_blocks", "dcd(block_length=8, e_max=4)+eos"])
def test_freedave_refuses_windows_that_depend_on_more_than_the_text(window: str) -> None:
    with pytest.raises(ConfigError, match=r"freedave needs (a window|steps) that follow"):
        compose(f"freedave+{window}")


def test_freedave_refuses_to_cache_a_window_that_slides() -> None:
    with pytest.raises(ConfigError, match="cache='dual' does not offer; use cache='none'"):
        dllm.generate("nano", "4 + 5?", sampler="freedave+dsb(4)", cache="dual", max_new_tokens=8)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("base", ["fixed", "threshold(0.95)", "localleap"])
def test_freedave_is_lossless_on_500_prompts(base: str, cache: str) -> None:
    slow, fast = check(500, base, cache)
    print(f"{base} {cache}: {slow} forwards, {fast} with drafts")
    assert fast <= slow
