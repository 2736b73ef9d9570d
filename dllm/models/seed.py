"""Models on ByteDance Seed's vocabulary, both Llama networks under plain names.

iLLaDA (arXiv 2606.25331) is the successor of LLaDA: bidirectional, grouped heads, tied embeddings.
Stable-DiffCoder (arXiv 2601.15892) was trained on from Seed-Coder, with attention in blocks of 4.
Neither file states the mask token: the official samplers pass 5.
"""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from .a2d import native
from .family import ConfigDict, Family, Published, Release, demand, register_family

RELEASES = {155136: Release(facts={"mask_token_id": 5})}


def illada_config(config: ConfigDict) -> PreTrainedConfig:
    """The Llama config of an official ``config.json``."""
    demand(config, {"layer_norm_eps": None}, "iLLaDA")  # RMS norms
    scaling = config.get("rope_scaling") or {}
    demand(scaling, {"rope_type": "default", "type": "default", "factor": 1.0}, "iLLaDA")
    return native(config, LlamaConfig, "iLLaDA")


def stable_diffcoder_config(config: ConfigDict) -> PreTrainedConfig:
    """The Llama config of an official ``config.json``."""
    return native(config, LlamaConfig, "Stable-DiffCoder")


ILLADA = register_family(
    Family(
        name="illada",
        architectures=("ILLaDAForCausalLM",),
        model_class=LlamaForCausalLM,
        to_native=illada_config,
        to_official=None,
        releases=RELEASES,
        checkpoints=(
            Published("GSAI-ML/iLLaDA-8B-Base", "Apache-2.0"),
            Published("GSAI-ML/iLLaDA-8B-Instruct", "Apache-2.0"),
        ),
        verified="by configuration; official code read",
        note="Its sampler appends blocks of 32 until an end token; a canvas here has one length.",
    )
)
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
