"""Configs of transformers' classes from a ``config.json`` that has their field names."""

from typing import Any, cast

from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from .family import ConfigDict, demand, require

FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings",
)  # fmt: skip
# I-DLM has SDAR's class, causal attention and a shifted head
ONLY = {"hidden_act": "silu", "use_sliding_window": False, "mlp_bias": False,
        "use_regular_causal": False}  # fmt: skip


def native(
    config: ConfigDict, kind: type[PreTrainedModel], name: str, required: tuple[str, ...] = ()
) -> PreTrainedConfig:
    """A config for networks of ``kind`` from one that differs in its model type only, and has to
    state the ``required`` fields, too."""
    made: Any = kind.config_class
    required = (*required, "head_dim") if made is Qwen3Config else required
    c = require(config, (*FIELDS, *required), name)
    demand(config, ONLY | ({} if made is Qwen2Config else {"attention_bias": False}), name)
    fields = {key: c[key] for key in FIELDS} | shared(config, name)
    if config.get("head_dim"):
        fields["head_dim"] = config["head_dim"]
    if made is not LlamaConfig:
        fields |= {"use_sliding_window": False, "sliding_window": None}
    return cast(PreTrainedConfig, made(**fields))


def shared(config: ConfigDict, name: str) -> dict[str, Any]:
    """What configs of all classes have: rotation, ids, the spread of new weights."""
    return {
        "rope_parameters": rotation(config, name),
        "initializer_range": config.get("initializer_range", 0.02),
        **{key: config.get(key) for key in ("eos_token_id", "bos_token_id", "pad_token_id")},
    }


def rotation(config: ConfigDict, name: str) -> dict[str, Any]:
    """``rope_parameters`` as transformers reads them: an old ``rope_scaling`` beside new ones is
    what somebody added, ``type`` is an old ``rope_type``, the base may stand outside."""
    new = config.get("rope_parameters") or {}
    stated = config.get("rope_scaling") or new
    theta = require({**new, **config, **stated}, ("rope_theta",), name)["rope_theta"]
    kind = stated.get("rope_type") or stated.get("type") or "default"
    return {**stated, "rope_type": kind, "rope_theta": float(theta)}
