"""Mixtures of experts on the Qwen3-MoE network: LLaDA-MoE and the large SDAR.

Head norms, softmax router and experts are those of transformers' class, under its own names.
LLaDA-MoE (arXiv 2509.24389) attends to the whole text and leaves the weights of its chosen experts
as they are, whatever ``norm_topk_prob`` says; SDAR-30B-A3B (arXiv 2510.06303) attends in blocks.
"""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ..core.errors import CheckpointError
from .block_causal import SDAR
from .family import ConfigDict, Family, Published, Release, demand, require
from .native import ONLY, shared

FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "num_experts",
    "num_experts_per_tok",
)  # fmt: skip
LLADA_ONLY = {
    "hidden_act": "silu", "qk_layernorm": True, "attention_bias": False, "clip_qkv": False,
    "partial_rotary_factor": 1, "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False, "shared_expert_intermediate_size": 0,
}  # fmt: skip
SDAR_FIELDS = (
    *FIELDS, "head_dim", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
    "norm_topk_prob", "decoder_sparse_step",
)  # fmt: skip
WHOLE: dict[str, Any] = {"use_sliding_window": False, "sliding_window": None}


def llada_moe_config(config: ConfigDict) -> PreTrainedConfig:
    """The Qwen3-MoE config of an official ``config.json``."""
    extra = ("qk_layernorm", "expert_intermediate_size", "moe_layer_freq")
    c = require(config, (*FIELDS, *extra), "LLaDA-MoE")
    demand(config, LLADA_ONLY, "LLaDA-MoE")
    frequency = list(c["moe_layer_freq"])
    if len(frequency) != c["num_hidden_layers"]:
        raise CheckpointError(
            f"moe_layer_freq in config.json speaks of {len(frequency)} layers, num_hidden_layers "
            f"of {c['num_hidden_layers']}; take the file from the original checkpoint"
        )
    known: dict[str, Any] = {name: c[name] for name in FIELDS}
    known["head_dim"] = c["hidden_size"] // c["num_attention_heads"]
    return Qwen3MoeConfig(
        **known, num_key_value_heads=config.get("num_key_value_heads") or c["num_attention_heads"],
        intermediate_size=config.get("dense_intermediate_size") or c["expert_intermediate_size"],
        moe_intermediate_size=c["expert_intermediate_size"],
        mlp_only_layers=[i for i, used in enumerate(frequency) if not used], decoder_sparse_step=1,
        norm_topk_prob=False, **WHOLE, **shared(config, "LLaDA-MoE"),
    )  # fmt: skip


def sdar_moe_config(config: ConfigDict) -> PreTrainedConfig:
    """The Qwen3-MoE config of an official ``config.json``."""
    c = require(config, SDAR_FIELDS, "SDAR")
    demand(config, ONLY | {"attention_bias": False}, "SDAR")
    return Qwen3MoeConfig(
        **{name: c[name] for name in SDAR_FIELDS},
        mlp_only_layers=config.get("mlp_only_layers") or [],
        **WHOLE, **shared(config, "SDAR"),
    )  # fmt: skip


LLADA_MOE = Family(
    name="llada_moe",
    architectures=("LLaDAMoEModelLM", "LLaDAMoEModel"),
    model_class=Qwen3MoeForCausalLM,
    to_native=llada_moe_config,
    end_of_turn="<|role_end|>",
    releases={157184: Release(facts={"mask_token_id": 156895, "eos_token_id": 156892})},
    checkpoints=(
        Published("inclusionAI/LLaDA-MoE-7B-A1B-Base", "Apache-2.0"),
        Published("inclusionAI/LLaDA-MoE-7B-A1B-Instruct", "Apache-2.0"),
    ),
    verified="logits of official code, within 4e-6",
)
SDAR_MOE = replace(
    SDAR,
    name="sdar_moe",
    architectures=("SDARMoeForCausalLM",),
    model_class=Qwen3MoeForCausalLM,
    to_native=sdar_moe_config,
    checkpoints=(Published("JetLM/SDAR-30B-A3B-Chat", block_length=4),),
    verified="by configuration",
)
