"""LLaDA2: a mixture of experts whose attention is causal between blocks.

Router, shared expert, head norms and partial rotation are those of transformers' GLM-4 MoE network;
weights have other names, and queries, keys and values lie in one matrix.  Blocks have 32 positions,
counted from position 0.  LLaDA2.1 shares the network, and is decoded with the sampler ``edit``.
Written from the published configurations; no released checkpoint was loaded yet.
"""

from typing import Any

from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import Split, WeightConverter, WeightRenaming

from .family import ConfigDict, Family, Published, Release, demand, require
from .native import rotation

SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "n_group",
    "topk_group", "routed_scaling_factor",
)  # fmt: skip
RENAMED = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
OTHERS = ("num_key_value_heads", "partial_rotary_factor")
ONLY = {
    "hidden_act": "silu", "use_qk_norm": True, "use_qkv_bias": False, "use_bias": False,
    "norm_head": False, "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    # LLaDA2.2: a block's tokens share a pool of experts, and some delete or insert others
    "expert_capacity": 0, "delete_token_id": None, "split_token_id": None,
}  # fmt: skip


class LLaDA2ForMaskedDiffusion(Glm4MoeForCausalLM):  # type: ignore[no-untyped-call]
    """The network under a name of its own, by which its weights are translated."""

    config_class = Glm4MoeConfig


class Parts(Split):
    """Pieces with memory of their own: views of one tensor cannot be saved."""

    def convert(self, *given: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: piece.clone() for name, piece in super().convert(*given, **named).items()}


def weights() -> list[Any]:
    """Official names and layout of the weights -> those of the network."""
    names = {
        "word_embeddings": "embed_tokens",
        "attention.dense": "self_attn.o_proj",
        "attention.query_layernorm": "self_attn.q_norm",
        "attention.key_layernorm": "self_attn.k_norm",
        "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
    }
    parts = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    experts = get_checkpoint_conversion_mapping("glm4_moe")  # type: ignore[no-untyped-call]
    return [
        *(WeightRenaming(old, new) for old, new in names.items()),
        WeightConverter("attention.query_key_value.weight", parts, [Parts(dim=0)]),
        *experts,
    ]


register_checkpoint_conversion_mapping(LLaDA2ForMaskedDiffusion.__name__, weights(), overwrite=True)


def llada2_config(config: ConfigDict) -> PreTrainedConfig:
    """The GLM-4 MoE config of an official ``config.json``."""
    c = require(config, (*SAME, *RENAMED, *OTHERS), "LLaDA2")
    demand(config, ONLY, "LLaDA2")
    return Glm4MoeConfig(
        **{name: c[name] for name in SAME},
        **{new: c[old] for old, new in RENAMED.items()},
        num_key_value_heads=c["num_key_value_heads"] or c["num_attention_heads"],
        norm_topk_prob=c["num_experts_per_tok"] > 1,  # whatever the field says
        rope_parameters={
            **rotation(config, "LLaDA2"), "partial_rotary_factor": c["partial_rotary_factor"],
        },
        use_qk_norm=True, attention_bias=False, num_mtp_layers=0,
        initializer_range=config.get("initializer_range", 0.02),
        eos_token_id=config.get("eos_token_id"), pad_token_id=config.get("pad_token_id"),
    )  # fmt: skip


LLADA2 = Family(
    name="llada2",
    architectures=("LLaDA2MoeModelLM",),
    model_class=LLaDA2ForMaskedDiffusion,
    to_native=llada2_config,
    score_source="tempered",
    k_first=True,
    mask_kind="block_causal",
    block_length=32,
    end_of_turn="<|role_end|>",
    releases={157184: Release(facts={"mask_token_id": 156895, "eos_token_id": 156892})},
    checkpoints=tuple(
        Published(f"inclusionAI/LLaDA{version}-{size}", "Apache-2.0")
        for version in ("2.0", "2.1")
        for size in ("mini", "flash")
    ),
    verified="logits of official code, equal",
    note='LLaDA2.1 edits what it has decided: `sampler="edit"`.',
)
