"""In bfloat16, too, a row is bit for bit what it is alone, where a processor multiplies it natively
and attention is the plain one: SDPA's result may depend on how many queries there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dllm
from dllm.models.precision import native_bfloat16

PROMPTS = [f"What is {n} + {3 * n}?" for n in range(10, 22)] + ["Sort this list: Zoe, Ben", "x"]


@pytest.mark.skipif(not native_bfloat16(), reason="bfloat16 products are emulated here")
@pytest.mark.parametrize("cache", ["none", "dual", "dkv(refresh_every=4)"])
def test_a_batch_is_its_rows_alone_bit_for_bit(cache: str) -> None:
    model = dllm.load("nano", dtype="bfloat16", attn_implementation="eager")
    how: dict[str, Any] = {"cache": cache, "sampler": "threshold(tau=0.95)", "max_new_tokens": 48}
    together = dllm.generate(model, PROMPTS, **how)
    for prompt, row in zip(PROMPTS, together, strict=True):
        alone = dllm.generate(model, prompt, **how)
        assert alone.tokens == row.tokens and alone.order == row.order
        np.testing.assert_array_equal(alone.logprobs, row.logprobs)
