"""A row is bit for bit what it is alone: tokens, order and log-probabilities, in float32 and in
bfloat16, with SDPA (the default) and with plain attention, where oneDNN multiplies."""

from functools import cache as once
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import dllm
from dllm.kernels.linear import available, dtypes

from ..golden.conftest import goldens_dir
from ..thin import covering, some

pytestmark = pytest.mark.skipif(not available(), reason="other products may depend on the rows")
WAYS = [("float32", "sdpa"), ("bfloat16", "sdpa"), ("bfloat16", "eager")]
CACHES = ("none", "prefix", "dual", "dkv(refresh_every=4)")
QUESTIONS = [f"What is {n} + {3 * n}?" for n in (10, 17, 21)] + ["Sort this list: Zoe, Ben", "x"]
IDS = [list(range(5, 5 + length)) for length in (1, 9, 24, 24, 40)]
SHAPE = {
    "vocab_size": 700, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 6, "max_position_embeddings": 512,
}  # fmt: skip


@once
def network(name: str, dtype: str, attention: str) -> dllm.DiffusionModel:
    """The bundled model, or random weights in the shape of LLaDA (a key head per head, rotated in
    float32) or Dream (grouped heads, shifted output)."""
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if name == "nano":
        return dllm.load("nano", **how)
    torch.manual_seed(1)
    how |= {"family": name, "mask_token_id": 699, "eos_token_id": 0}
    if name == "llada":
        return dllm.load(LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=6)), **how)
    return dllm.load(Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2)), **how)


@pytest.mark.parametrize(
    ("cache", "name", "way"), covering(CACHES, ["nano", "llada", "dream"], WAYS)
)
def test_a_batch_is_its_rows_alone_bit_for_bit(cache: str, name: str, way: tuple[str, str]) -> None:
    dtype, attention = way
    if getattr(torch, dtype) not in dtypes():
        pytest.skip("bfloat16 is emulated here")
    model = network(name, dtype, attention)
    how: dict[str, Any] = {
        "cache": cache, "sampler": "threshold(tau=0.95)", "max_new_tokens": 32,
        "block_length": 16, "eos_policy": "none",
    }  # fmt: skip
    if name != "nano":
        how |= {"sampler": "llada", "steps": 8}  # random weights are sure of nothing
    prompts: list[Any] = QUESTIONS if name == "nano" else IDS
    together = dllm.generate(model, prompts, **how)
    for number in (0, 2, 4):
        alone, row = dllm.generate(model, prompts[number], **how), together[number]
        assert alone.tokens == row.tokens and alone.order == row.order
        np.testing.assert_array_equal(alone.logprobs, row.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(["dream", "llada"], 1))
def test_small_weights_too_with_caches_that_compute_few_rows(name: str) -> None:
    model = dllm.load(goldens_dir() / f"{name}-tiny")
    for cache in ("elastic", "dkv", "dllm_cache"):
        how: dict[str, Any] = {"cache": cache, "sampler": "llada", "max_new_tokens": 11}
        together = dllm.generate(model, IDS[:3], **how)
        for ids, row in zip(IDS, together, strict=False):
            alone = dllm.generate(model, ids, **how)
            assert np.array_equal(alone.logprobs, row.logprobs) and alone.order == row.order
