"""Which layers of a network are multiplied by oneDNN, and that its results stay what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dllm
from dllm.kernels.linear import available, packed_of
from dllm.models import adopt, linears

pytestmark = pytest.mark.skipif(not available(), reason="no AVX-512, or no oneDNN")
PROMPTS = ["What is 23 + 12?", "Reverse this list: Tom, Anna, Ben", "Sort this list: Zoe, Ben"]


def packed(model: dllm.DiffusionModel) -> list[str]:
    return [name for name, module in model.hf.named_modules() if packed_of(module) is not None]


def test_all_linear_layers_and_the_head_are_packed() -> None:
    model = dllm.load("nano")
    layers = [name for name, module in model.hf.named_modules() if type(module) is nn.Linear]
    assert packed(model) == layers and "lm_head" in layers


def test_what_somebody_wrapped_is_left_alone() -> None:
    hf = dllm.load("nano").hf
    layer: Any = hf.model.layers[0].mlp.up_proj
    wrapped = layer.forward = lambda x: nn.Linear.forward(layer, x)
    linears.pack_linears(hf)
    assert layer.forward is wrapped and packed_of(layer) is None


def test_texts_are_those_of_the_plain_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy of the weights, where memory is short, even the same bits."""
    model = dllm.load("nano")
    monkeypatch.setattr(linears, "free_memory", lambda: 0)
    short = dllm.load("nano")
    monkeypatch.setattr(adopt, "pack_linears", lambda hf: None)
    plain = dllm.load("nano")
    assert not packed(plain)
    for prompt in PROMPTS:
        result, same, expected = (
            dllm.generate(m, prompt, sampler="threshold", cache="dual")
            for m in (model, short, plain)
        )
        assert result.tokens == expected.tokens and result.order == expected.order
        np.testing.assert_array_equal(result.logprobs, same.logprobs)


def test_an_engine_notices_weights_that_changed_behind_its_back() -> None:
    model = dllm.load("nano")
    before = dllm.generate(model, PROMPTS[0])
    with torch.no_grad():
        for module in model.hf.modules():
            if type(module) is nn.Linear:
                module.weight.data.zero_()
    assert dllm.generate(model, PROMPTS[0], min_new_tokens=4).text != before.text
