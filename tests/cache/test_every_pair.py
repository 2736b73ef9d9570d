"""Every sampler with every cache: what goes together is exact where it says so, and row by row
what it is alone; what does not is refused."""

from functools import lru_cache
from typing import Any

import pytest

import dllm
from dllm import cache as caches
from dllm.core.capabilities import (
    BLOCK_CAUSAL,
    FIXED_WINDOW,
    SLIDING_BRANCHES,
    UNIFORM_NOISE,
)
from dllm.samplers import compose

from ..decoding import replayed
from ..golden.conftest import goldens_dir
from ..settings import EXACT, OWN_MODELS, SMALL, every_sampler
from ..thin import some

PROMPTS = [[5, 9, 17, 40, 3], [7], [100, 23, 54, 54, 61, 9, 33, 200, 14, 15, 8]]
MODELS = ["llada-tiny", "dream-tiny"]
SETTINGS = [spec for name, spec in SMALL.items() if name not in ("none", *OWN_MODELS)]
SAMPLERS = every_sampler()


@lru_cache(256)
def load(name: str) -> dllm.DiffusionModel:
    return dllm.load(goldens_dir() / name)


@lru_cache(256)
def run(name: str, prompt: int | None, sampler: str, cache: str) -> Any:
    """Decode one of the prompts, or all of them together."""
    model = load(name)
    prompts = PROMPTS if prompt is None else PROMPTS[prompt]
    return dllm.generate(
        model, prompts, sampler=sampler, cache=cache, max_new_tokens=14, trace=True
    )


def refused(name: str, sampler: str, cache: str) -> bool:
    """Whether what the two declare forbids the pair, or the model the sampler."""
    family = load(name).family.name
    parts, how = compose(sampler, family=family), caches.compose(cache, family)
    needs = {need for part in parts.parts for need in part.needs}
    stays = how.branches_slide or not how.stores or FIXED_WINDOW in parts.window.offers
    offers = how.offers | {SLIDING_BRANCHES} if stays else how.offers
    return bool(
        {need for need in needs if "a cache" in need.remedies} - offers
        or {need for need in how.needs if "a sampler" in need.remedies} - parts.offers
        or needs & {BLOCK_CAUSAL, UNIFORM_NOISE}
    )


def check_exact(name: str, sampler: str, cache: str) -> None:
    if refused(name, sampler, cache):
        with pytest.raises(dllm.ConfigError, match=r" needs .* which .* does not offer; "):
            run(name, 2, sampler, cache)
        return
    reference, exact = (run(name, 2, sampler, how) for how in ("none", cache))
    assert replayed(exact) == replayed(reference)
    assert exact.logprobs == pytest.approx(reference.logprobs, abs=1e-5)


def check_alone(name: str, sampler: str, cache: str) -> None:
    """With traces; tests/fuzz draws from the same product."""
    if refused(name, sampler, cache):
        with pytest.raises(dllm.ConfigError):
            run(name, None, sampler, cache)
        return
    alone = [run(name, prompt, sampler, cache) for prompt in range(len(PROMPTS))]
    assert [replayed(r) for r in run(name, None, sampler, cache)] == [replayed(r) for r in alone]


@pytest.mark.parametrize("i", some(range(len(SAMPLERS)), 5), ids=SAMPLERS)
def test_a_cache_at_its_exact_setting_is_no_cache(i: int) -> None:
    """C14, each sampler with one of the caches."""
    check_exact(MODELS[i % 2], SAMPLERS[i], EXACT[i % len(EXACT)])


@pytest.mark.parametrize("i", some(range(len(SETTINGS)), 2), ids=SETTINGS)
def test_a_batch_equals_its_rows_alone(i: int) -> None:
    """Each cache with one of the samplers."""
    check_alone(MODELS[i % 2], SAMPLERS[i * len(SAMPLERS) // len(SETTINGS)], SETTINGS[i])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_cache(name: str, sampler: str) -> None:
    for cache in EXACT:
        check_exact(name, sampler, cache)
    for cache in SETTINGS:
        check_alone(name, sampler, cache)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_settings_take_several_steps(name: str) -> None:
    """Otherwise there would be nothing to cache."""
    for sampler in SAMPLERS:
        if not refused(name, sampler, "none"):
            assert run(name, 2, sampler, "none").nfe >= 3, sampler


def test_every_cache_is_tested() -> None:
    names = {info.name for info in dllm.cache.available()}
    assert names == {spec.partition("(")[0] for spec in SMALL.values()}
    inexact = {"none", "dkv_pd", "d2f", *OWN_MODELS}
    assert names - inexact == {spec.partition("(")[0] for spec in EXACT}
