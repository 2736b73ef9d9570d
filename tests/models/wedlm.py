"""Tiny WeDLM checkpoints in the official layout, and what their networks compute."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

MASK, EOS, VOCAB = 63, 60, 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": EOS,
}  # fmt: skip
OFFICIAL = {
    "architectures": ["WeDLMForCausalLM"], "model_type": "wedlm", "rope_theta": 1e6,
    "mask_token_id": MASK, "pad_token_id": EOS, "torch_dtype": "float32",
    "auto_map": {"AutoModelForCausalLM": "modeling_wedlm.WeDLMForCausalLM"},
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "wedlm": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16},
              {"qk_norm": True, "attention_bias": False}),
    "wedlm_qwen2": (Qwen2ForCausalLM, Qwen2Config, {}, {"qk_norm": False, "attention_bias": True}),
}  # fmt: skip


def network(family: str, **fields: Any) -> Any:
    """The network of transformers that the family is, with weights that prefer something."""
    kind, config, more, _ = FAMILIES[family]
    torch.manual_seed(1)
    rope = {"rope_type": "default", "rope_theta": 1e6}
    made = config(**{**SHAPE, **fields}, **more, rope_parameters=rope)
    made._attn_implementation = "eager"
    hf = kind(made).eval()
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            if name.endswith("norm.weight"):
                weight.add_(torch.randn_like(weight) * 0.2)
            elif name.endswith("bias"):
                weight.copy_(torch.randn_like(weight) * 0.5)
            else:
                weight.mul_(6)
    return hf


def write(folder: Path, family: str, **fields: Any) -> Any:
    """A checkpoint as Tencent's are; its network."""
    hf = network(family)
    folder.mkdir(exist_ok=True)
    save_file(hf.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    *_, more, told = FAMILIES[family]
    config = {**SHAPE, **OFFICIAL, **more, **told, **fields}
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return hf


def reordered_logits(hf: Any, tokens: np.ndarray, masked: np.ndarray) -> torch.Tensor:
    """(L, V): logits at every position of a causal forward over decided tokens, then masks."""
    order = np.concatenate([np.flatnonzero(~masked), np.flatnonzero(masked)])
    ids = torch.from_numpy(np.where(masked, MASK, tokens)[order])[None]
    with torch.inference_mode():
        logits = hf(
            ids, position_ids=torch.from_numpy(order)[None], attention_mask=torch.ones_like(ids),
            use_cache=False,
        ).logits[0]  # fmt: skip
    result = torch.empty_like(logits)
    result[torch.from_numpy(order)] = logits
    return result
