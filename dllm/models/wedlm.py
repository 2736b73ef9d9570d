"""WeDLM: causal networks that fill in masks, because the text is reordered for them.

WeDLM (arXiv 2512.22737) keeps the causal attention of Qwen3 or Qwen2.5.  In every forward decided
tokens come first and masks last, all with the position ids of the text, so that each mask sees
every decided token, those to its right included, and the keys and values of the decided beginning
are those of ordinary causal decoding.  A mask predicts its own token.  A decided token predicts the
next one, as before: the same weights are an autoregressive model, which `dllm.score` asks and which
verifies drafts.  One architecture name stands for both networks; ``qk_norm`` tells them apart.
"""

from dataclasses import replace

from transformers import PreTrainedConfig, Qwen2ForCausalLM, Qwen3ForCausalLM

from .family import ConfigDict, Family, Published, demand, require
from .native import native

DISTINGUISHING = ("qk_norm", "attention_bias")  # fields that tell the two networks apart


def qwen3_config(config: ConfigDict) -> PreTrainedConfig:
    """The Qwen3 config of an official ``config.json``."""
    sizes = require(config, (*DISTINGUISHING, "hidden_size", "num_attention_heads"), "WeDLM")
    demand(config, {"qk_norm": True}, "WeDLM")
    size = config.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    return native({**config, "head_dim": size}, Qwen3ForCausalLM, "WeDLM")


def qwen2_config(config: ConfigDict) -> PreTrainedConfig:
    """The Qwen2 config of an official ``config.json``."""
    require(config, DISTINGUISHING, "WeDLM on Qwen2.5")
    demand(config, {"qk_norm": False, "attention_bias": True}, "WeDLM on Qwen2.5")
    return native(config, Qwen2ForCausalLM, "WeDLM on Qwen2.5")


WEDLM_QWEN2 = Family(
    name="wedlm_qwen2",
    architectures=("WeDLMForCausalLM",),
    model_class=Qwen2ForCausalLM,
    to_native=qwen2_config,
    mask_kind="decided_first",
    end_of_turn="<|im_end|>",
    tokenizer_class="Qwen2Tokenizer",
    checkpoints=(Published("tencent/WeDLM-7B-Base"), Published("tencent/WeDLM-7B-Instruct")),
    verified="logits of official code, equal, reordered text",
)
WEDLM = replace(
    WEDLM_QWEN2,
    name="wedlm",
    where={"qk_norm": True},
    model_class=Qwen3ForCausalLM,
    to_native=qwen3_config,
    checkpoints=(Published("tencent/WeDLM-8B-Base"), Published("tencent/WeDLM-8B-Instruct")),
    note="Decode with `sampler='wedlm', cache='wedlm'`.  Where a checkpoint states no mask "
    "token, Tencent's engine takes id 151665: pass `mask_token_id=151665`.",
)
