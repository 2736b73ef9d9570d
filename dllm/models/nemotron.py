"""Nemotron-Labs-Diffusion: one Ministral network that is a diffusion and a causal model.

arXiv 2607.05722.  As a diffusion model it predicts in place, in blocks of 32 that are counted from
the end of the prompt.  What stands before the open block is read causally, and that pass predicts
the block's first token.  The same weights with a causal mask throughout are the family
``nemotron_causal``, which verifies drafts.
"""

from dataclasses import replace

from transformers import Ministral3Config, Ministral3ForCausalLM, PreTrainedConfig

from .family import ConfigDict, Family, Published, Release, demand, require
from .native import FIELDS, ONLY, shared

FIXED = ONLY | {"attention_bias": False, "sliding_window": False, "tie_word_embeddings": False}
ARCHITECTURES = ("NemotronLabsDiffusionModel",)
KEY_MAP = {r"^encoder\.": "model.", r"^diffusion_head\.": "lm_head."}


def nemotron_config(config: ConfigDict) -> PreTrainedConfig:
    """The Ministral-3 config of an official ``config.json``."""
    name = "Nemotron-Labs-Diffusion"
    c = require(config, (*FIELDS, "head_dim", "block_size", "rope_parameters"), name)
    demand(config, FIXED, name)
    scale = ("llama_4_scaling_beta", "original_max_position_embeddings")
    require(c["rope_parameters"], scale, name)
    known = {key: c[key] for key in (*FIELDS, "head_dim")}
    return Ministral3Config(**known, **shared(config, name))


NEMOTRON_CAUSAL = Family(
    name="nemotron_causal",
    architectures=ARCHITECTURES,
    model_class=Ministral3ForCausalLM,
    to_native=nemotron_config,
    logit_shift=1,
    mask_kind="causal",
    key_map=KEY_MAP,
)
NEMOTRON = replace(
    NEMOTRON_CAUSAL,
    name="nemotron",
    logit_shift=0,
    mask_kind="causal_prefix",
    prefix_predicts=True,
    block_field="block_size",
    releases={131072: Release(facts={"mask_token_id": 100})},
    checkpoints=tuple(
        Published(f"nvidia/Nemotron-Labs-Diffusion-{size}{kind}")
        for size in ("3B", "8B", "14B")
        for kind in ("", "-Base")
    ),
    note="A pass over what is finished gives the first token of every block.",
)
