"""What a GPU decodes is what the CPU decodes, by every sampler and every cache."""

from functools import cache

import pytest
import torch

import dllm
from dllm.cache import CACHES
from dllm.samplers import SAMPLERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
PROMPTS = ["What is 23 + 12?", "Reverse this list: Tom, Anna, Ben"]


@cache
def model(device: str) -> dllm.DiffusionModel:
    return dllm.load("nano", device=device, dtype="float32")


@pytest.mark.parametrize(
    ("sampler", "cache"),
    [*((name, "none") for name in SAMPLERS), *(("threshold", name) for name in CACHES)],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_texts_are_those_of_the_cpu(sampler: str, cache: str, temperature: float) -> None:
    def decode(device: str) -> list[str]:
        results = dllm.generate(
            model(device), PROMPTS, sampler=sampler, cache=cache, max_new_tokens=32,
            temperature=temperature, seed=1,
        )  # fmt: skip
        return [result.text for result in results]

    try:
        wanted = decode("cpu")
    except dllm.ConfigError as error:
        pytest.skip(str(error))
    assert decode("cuda") == wanted
