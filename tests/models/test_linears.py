"""Which layers of a network are multiplied by oneDNN, and that its results stay what they were."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import dllm
from dllm.kernels.linear import available, packed_of
from dllm.models import adopt, linears
from dllm.models.checkpoint import open_checkpoint
from dllm.models.footprint import footprint

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


@pytest.mark.slow
def test_an_engine_notices_weights_that_changed_behind_its_back() -> None:
    model = dllm.load("nano")
    before = dllm.generate(model, PROMPTS[0])
    with torch.no_grad():
        for module in model.hf.modules():
            if type(module) is nn.Linear:
                module.weight.data.zero_()
    assert dllm.generate(model, PROMPTS[0], min_new_tokens=4).text != before.text


def test_a_network_that_is_called_has_its_weights_as_they_are() -> None:
    """Adapters are merged through ``weight.data``, which PyTorch does not count as a change."""
    hf, ids = dllm.load("nano-ar").hf, torch.arange(8)[None]
    with torch.no_grad():
        before = hf(ids).logits
        for twin in (hf, pickle.loads(pickle.dumps(hf))):
            twin(ids)
            twin.lm_head.weight.data.mul_(2)
            torch.testing.assert_close(twin(ids).logits, 2 * before)
            twin.lm_head.weight.data.div_(2)
    model = dllm.load("nano-ar")
    scored = dllm.score(model, "1 + 2 =", " 3.").logprob
    model.hf.model.layers[0].mlp.down_proj.weight.data.zero_()
    assert dllm.score(model, "1 + 2 =", " 3.").logprob != scored


RESIDENT = """
import sys, torch, dllm
from pathlib import Path
def held():
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(1024 * int(line[1]) for line in lines if line[0] in ("RssAnon:", "RssFile:"))
dllm.generate("nano", [5, 6], max_new_tokens=2)
before = held()
model = dllm.load(sys.argv[1], threads=1)
dllm.generate(model, [5, 6], sampler="llada(steps=1)", max_new_tokens=4, eos_policy="none")
print(held() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no resident memory to read")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_what_is_held_is_what_the_footprint_says(stored: torch.dtype, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=2048, hidden_size=768, intermediate_size=2048, num_hidden_layers=8,
        num_attention_heads=12, max_position_embeddings=64,
    )  # fmt: skip
    network = LlamaForCausalLM(config).to(stored)
    dllm.load(network, family="llada", mask_token_id=2047, eos_token_id=0).save_pretrained(tmp_path)
    needs = footprint(open_checkpoint(tmp_path))
    cast = needs.dtype != str(stored).removeprefix("torch.")
    assert needs.parameters > 50_000_000 and (needs.copies > 0) == cast
    done = subprocess.run([sys.executable, "-c", RESIDENT, str(tmp_path)], capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert int(done.stdout) == pytest.approx(needs.weights + needs.copies, rel=0.15)
