"""LLaDA: a Llama network under other names, without a causal mask.

Large Language Diffusion Models, arXiv 2502.09992.  The same class serves LLaDA 1.5 and the
fine-tunes that keep the architecture.  Queries and keys are rotated in float32.
"""

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from .family import ConfigDict, Family, Published, Release, demand, require

FIELDS = {  # of config.json, official -> native
    "d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
    "mlp_hidden_size": "intermediate_size", "max_sequence_length": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps", "weight_tying": "tie_word_embeddings",
}  # fmt: skip
REQUIRED = (
    *FIELDS, "vocab_size", "rope", "rope_theta", "rope_full_precision", "block_type",
    "layer_norm_type", "activation_type", "include_bias", "include_qkv_bias", "mask_token_id",
    "eos_token_id",
)  # fmt: skip
ONLY = {
    "block_type": "llama", "block_group_size": 1, "layer_norm_type": "rms",
    "layer_norm_with_affine": True, "bias_for_layer_norm": False, "activation_type": "silu",
    "include_bias": False, "include_qkv_bias": False, "rope": True, "rope_full_precision": True,
    "alibi": False, "attention_layer_norm": False, "input_emb_norm": False, "scale_logits": False,
    "clip_qkv": False, "sliding_window": False,
}  # fmt: skip
LAYER = r"^model\.transformer\.blocks\.(\d+)\."
NAMES = {
    "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj", "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}  # fmt: skip
KEY_MAP = {
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",  # inside a block the same name is the MLP
} | {rf"{LAYER}{old}\.": rf"model.layers.\1.{new}." for old, new in NAMES.items()}

# The shipped template appends the assistant header even when it is not asked for.
CHAT_TEMPLATE = (
    "{{- '<|startoftext|>' -}}{%- for message in messages -%}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
)


def to_native(config: ConfigDict) -> PreTrainedConfig:
    """The Llama config of an official ``config.json``."""
    c = require(config, REQUIRED, "LLaDA")
    demand(config, ONLY, "LLaDA")
    kv_heads = 1 if config.get("multi_query_attention") else config.get("n_kv_heads")
    return LlamaConfig(
        vocab_size=config.get("embedding_size") or c["vocab_size"],  # padding rows included
        **{new: c[old] for old, new in FIELDS.items()},
        num_key_value_heads=kv_heads or c["n_heads"],
        rope_parameters={"rope_type": "default", "rope_theta": float(c["rope_theta"])},
        initializer_range=config.get("init_std", 0.02),
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=c["eos_token_id"],
        pad_token_id=config.get("pad_token_id"),
    )


def to_official(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of an official ``config.json`` that describe this Llama network."""
    c: Any = config
    demand(c.rope_parameters, {"rope_type": "default"}, "LLaDA")  # no field could say another
    fixed = {name: value for name, value in ONLY.items() if name != "sliding_window"}
    return fixed | {
        **{old: getattr(c, new) for old, new in FIELDS.items()}, "architectures": ["LLaDAModelLM"],
        "model_type": "llada", "n_kv_heads": c.num_key_value_heads, "vocab_size": c.vocab_size,
        "embedding_size": c.vocab_size, "rope_theta": c.rope_parameters["rope_theta"],
        "init_std": c.initializer_range, "clip_qkv": None, "multi_query_attention": None,
        "use_cache": False,
    }  # fmt: skip


LLADA = Family(
    name="llada",
    architectures=("LLaDAModelLM",),
    model_class=LlamaForCausalLM,
    to_native=to_native,
    to_official=to_official,
    key_map=KEY_MAP,
    float32_rotation=True,
    mask_token="<|mdm_mask|>",
    end_of_turn="<|eot_id|>",
    chat_template=CHAT_TEMPLATE,
    replace_chat_template=True,
    releases={
        126464: Release(
            facts={"mask_token_id": 126336, "eos_token_id": 126081, "pad_token_id": 126081},
            tokens={
                "<|startoftext|>": 126080, "<|endoftext|>": 126081, "<|mdm_mask|>": 126336,
                "<|start_header_id|>": 126346, "<|end_header_id|>": 126347, "<|eot_id|>": 126348,
            },
        )
    },
    checkpoints=(
        Published("GSAI-ML/LLaDA-8B-Base", "MIT"), Published("GSAI-ML/LLaDA-8B-Instruct", "MIT"),
        Published("GSAI-ML/LLaDA-1.5", "MIT"), Published("Zigeng/dParallel-LLaDA-8B-instruct"),
        Published("d3LLM/d3LLM_LLaDA"),
    ),
    verified="logits and decoding traces of official code",
)  # fmt: skip
