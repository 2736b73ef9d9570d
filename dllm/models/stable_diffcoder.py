"""Stable-DiffCoder (arXiv 2601.15892): Seed-Coder, a Llama network, with attention in blocks of 4.

Its files do not state the mask token: the official sampler passes 5.
"""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from .a2d import native
from .family import ConfigDict, Family, Published, Release, register_family

RELEASES = {155136: Release(facts={"mask_token_id": 5})}


def stable_diffcoder_config(config: ConfigDict) -> PreTrainedConfig:
    """The Llama config of an official ``config.json``."""
    return native(config, LlamaConfig, "Stable-DiffCoder")


STABLE_DIFFCODER = register_family(
    Family(
        name="stable_diffcoder",
        architectures=("StableDiffcoderForCausalLM",),
        model_class=LlamaForCausalLM,
        to_native=stable_diffcoder_config,
        to_official=None,
        mask_kind="block_causal",
        block_length=4,
        releases=RELEASES,
        checkpoints=(
            Published("ByteDance-Seed/Stable-DiffCoder-8B-Base", "MIT"),
            Published("ByteDance-Seed/Stable-DiffCoder-8B-Instruct", "MIT"),
        ),
        verified="by configuration; official code read: transformers' own Llama under a mask",
    )
)
