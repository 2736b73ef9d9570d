"""Rows do not influence one another; caches at their exact setting change nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dllm
from dllm.core.config import GenerationConfig
from dllm.engine.recipe import Recipe, RowOptions
from dllm.engine.work import Work
from dllm.kernels.statistics.filters import Filters
from dllm.samplers.base import Draws

from ..decoding import replayed
from ..golden.conftest import goldens_dir

MODELS = ["llada-tiny", "dream-tiny"]
CACHES = ["none", "prefix", "dual"]
PROMPTS = [[5, 9, 17, 40, 3], [7], [100, 23, 54, 54, 61, 9, 33, 200, 14, 15, 8]]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> dllm.DiffusionModel:
    return dllm.load(Path(goldens_dir()) / request.param)


def run(model: dllm.DiffusionModel, prompt: Any, sampler: str, cache: str, **extra: Any) -> Any:
    arguments: dict[str, Any] = {"max_new_tokens": 20, "eos_policy": "none", "trace": True}
    if "+" not in sampler and not sampler.startswith("dream"):
        arguments["block_length"] = 8
    if sampler.startswith(("llada", "dream")):
        arguments["steps"] = 10
    return dllm.generate(model, prompt, sampler=sampler, cache=cache, **{**arguments, **extra})


def test_pd_that_refreshes_each_step_is_prefill(model: dllm.DiffusionModel) -> None:
    pd = run(model, PROMPTS[2], "llada", "dkv_pd(refresh_every=1)")
    assert replayed(pd) == replayed(run(model, PROMPTS[2], "llada", "dkv_prefill"))


def test_a_result_says_what_its_cache_held(model: dllm.DiffusionModel) -> None:
    config = model.hf.config
    head = config.hidden_size // config.num_attention_heads
    per_position = 2 * config.num_hidden_layers * config.num_key_value_heads * head * 4
    prompts = [[1, 2, 3], [1, 2, 3, 4, 5]]
    for cache, scale, times in (("none", 0.0, 0), ("dual", 0.0, 1), ("dual", 0.5, 2)):
        results = dllm.generate(model, prompts, cache=cache, cfg_scale=scale, max_new_tokens=16)
        held = (3 + 16 + 5 + 16) * per_position * times  # end to end, no row is padded
        assert [r.cache_bytes for r in results] == [held] * 2


def test_caches_compute_less_and_are_not_exact(model: dllm.DiffusionModel) -> None:
    results = {cache: run(model, PROMPTS[2], "llada", cache, steps=20) for cache in CACHES}
    computed = {cache: result.computed for cache, result in results.items()}
    assert computed["dual"] < computed["prefix"] < computed["none"]
    assert results["none"].computed == results["none"].nfe * (len(PROMPTS[2]) + 20)


def test_guidance_counts_one_forward_and_both_lanes(model: dllm.DiffusionModel) -> None:
    plain = run(model, PROMPTS[0], "llada", "none")
    guided = run(model, PROMPTS[0], "llada", "none", cfg_scale=1.0)
    assert guided.nfe == plain.nfe
    assert guided.computed == 2 * plain.computed


def test_a_step_reads_at_a_temperature_or_without_what_is_held() -> None:
    options = RowOptions((), 0, Filters(), 1, frozenset())
    hot, apart = options.at(Draws(2.0)), options.at(Draws(signal=0.25))
    assert (hot.scale, hot.signal, hot.filters.temperature) == (0.5, None, 1.0)
    assert (apart.scale, apart.signal, apart.filters.temperature) == (1.0, 0.25, 1.0)


@pytest.mark.parametrize(
    ("limit", "alone", "expected"),
    [(8, (), [[3, 5], [6], [9]]), (7, (), [[3], [5], [6], [9]]), (None, (), [[3, 5, 6, 9]]),
     (99, (5,), [[3], [5], [6, 9]]), (None, (9,), [[3, 5, 6], [9]])],
)  # fmt: skip
def test_what_goes_into_one_forward(
    limit: int | None, alone: tuple[int, ...], expected: list[list[int]]
) -> None:
    """As many positions as may be, the small rows first; some rows go alone."""
    rows: Any = [SimpleNamespace(cost=n, order=(n,), alone=n in alone) for n in (9, 3, 6, 5)]
    chunks = Work._chunks(SimpleNamespace(), rows, limit)  # type: ignore[arg-type,var-annotated]
    assert [[row.cost for row in chunk] for chunk in chunks] == expected


@pytest.mark.parametrize(("prompt", "most"), [(30, 64), (36, 64), (37, 32)])
def test_canvases_of_uniform_noise_are_whole(prompt: int, most: int) -> None:
    """In a context of 100, of which the caller asks for no share."""
    recipe: Any = SimpleNamespace(config=GenerationConfig(), grows=False)
    facts: Any = SimpleNamespace(context_length=100, block_length=32, uniform=True)
    assert Recipe.cap(recipe, facts, prompt) == most
