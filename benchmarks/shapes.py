"""Models with the shape of real ones and random weights."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import dllm


def llada_135m(dtype: str = "float32") -> dllm.DiffusionModel:
    """A LLaDA-shaped model of about 135M parameters (30 layers, width 576)."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=9, max_position_embeddings=8192,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return _loaded(LlamaForCausalLM(config), "llada", dtype)


def dream_135m(dtype: str = "float32") -> dllm.DiffusionModel:
    """A Dream-shaped model of about 120M parameters: grouped queries (9 to 3 heads), shift 1."""
    config = Qwen2Config(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return _loaded(Qwen2ForCausalLM(config), "dream", dtype)


def _loaded(hf: PreTrainedModel, family: str, dtype: str) -> dllm.DiffusionModel:
    hf = hf.to(getattr(torch, dtype))
    return dllm.load(hf, family=family, mask_token_id=49151, eos_token_id=0)
