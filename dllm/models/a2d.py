"""A2D: autoregressive networks that were trained on to be diffusion models, unchanged otherwise.

Llama, Qwen2 and Qwen3 under plain names, without a causal mask and without a shift (dLLM, arXiv
2602.22661; OPDLM, arXiv 2606.06712).  Nothing in a checkpoint says whether it attends to the whole
text or in blocks: that is known of the published ones, and said with ``block_length=`` for others.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from .family import ConfigDict, Family, Published, demand, register_family, require

FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings",
)  # fmt: skip
IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
ONLY = {"hidden_act": "silu", "use_sliding_window": False, "mlp_bias": False}


def native(config: ConfigDict, kind: type[PreTrainedConfig], name: str) -> PreTrainedConfig:
    """A config of ``kind`` from one that differs in its model type only."""
    extra = ("head_dim",) if kind is Qwen3Config else ()
    c = require(config, (*FIELDS, *extra), name)
    demand(config, ONLY | ({} if kind is Qwen2Config else {"attention_bias": False}), name)
    fields: dict[str, Any] = {
        "rope_parameters": rotation(config, name),
        "initializer_range": config.get("initializer_range", 0.02),
        **{key: config.get(key) for key in IDS},
    }
    if kind is LlamaConfig and config.get("head_dim"):
        fields["head_dim"] = config["head_dim"]
    if kind is not LlamaConfig:
        fields |= {"use_sliding_window": False, "sliding_window": None}
    return kind(**{key: c[key] for key in (*FIELDS, *extra)}, **fields)


def rotation(config: ConfigDict, name: str) -> dict[str, Any]:
    """``rope_parameters`` of an old or a new ``config.json``."""
    new = config.get("rope_parameters")
    if new:
        require(new, ("rope_theta",), name)
        return {"rope_type": "default", **new}
    old = {"rope_type": "default"} | (config.get("rope_scaling") or {})
    return old | {"rope_theta": float(require(config, ("rope_theta",), name)["rope_theta"])}


def llama_config(config: ConfigDict) -> PreTrainedConfig:
    """The Llama config of an official ``config.json``."""
    return native(config, LlamaConfig, "A2D Llama")


def qwen2_config(config: ConfigDict) -> PreTrainedConfig:
    """The Qwen2 config of an official ``config.json``."""
    return native(config, Qwen2Config, "A2D Qwen2")


def qwen3_config(config: ConfigDict) -> PreTrainedConfig:
    """The Qwen3 config of an official ``config.json``."""
    return native(config, Qwen3Config, "A2D Qwen3")


A2D_LLAMA = register_family(
    Family(
        name="a2d_llama",
        architectures=("A2DLlamaLMHeadModel",),
        model_class=LlamaForCausalLM,
        to_native=llama_config,
        to_official=None,
        any_blocks=True,
        end_of_turn="<|eot_id|>",
    )
)
A2D_QWEN2 = register_family(
    Family(
        name="a2d_qwen2",
        architectures=("A2DQwen2LMHeadModel",),
        model_class=Qwen2ForCausalLM,
        to_native=qwen2_config,
        to_official=None,
        any_blocks=True,
        mask_token="<|mask|>",
        end_of_turn="<|im_end|>",
        tokenizer_class="Qwen2Tokenizer",
    )
)
A2D_QWEN3 = register_family(
    Family(
        name="a2d_qwen3",
        architectures=("A2DQwen3LMHeadModel",),
        model_class=Qwen3ForCausalLM,
        to_native=qwen3_config,
        to_official=None,
        any_blocks=True,
        mask_token="<|mask|>",
        end_of_turn="<|im_end|>",
        tokenizer_class="Qwen2Tokenizer",
        thinking=False,
        checkpoints=(
            Published("dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", "Apache-2.0"),
            Published("dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1", "Apache-2.0", block_length=32),
            *(
                Published(f"divelab/OPDLM-{size}", block_length=4)
                for size in ("0.6B", "1.7B", "4B", "8B")
            ),
        ),
        verified="logits of official code, equal, whole text and blocks, small random checkpoint",
        note="A copy in a folder of another name needs `block_length=` where the table has one.",
    )
)
