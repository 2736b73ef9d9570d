"""Llama networks under plain names whose files do not state the mask token: their samplers pass 5.

iLLaDA (arXiv 2606.25331), the successor of LLaDA, is bidirectional, with grouped heads and tied
embeddings.  Stable-DiffCoder (arXiv 2601.15892), which was Seed-Coder, attends in blocks of 4.
"""

from functools import partial

from transformers import LlamaForCausalLM, PreTrainedConfig

from .family import ConfigDict, Family, Published, Release, demand
from .native import native

RELEASES = {155136: Release(facts={"mask_token_id": 5})}


def illada_config(config: ConfigDict) -> PreTrainedConfig:
    """The Llama config of an official ``config.json``."""
    demand(config, {"layer_norm_eps": None}, "iLLaDA")  # RMS norms
    scaling = config.get("rope_scaling") or {}
    demand(scaling, {"rope_type": "default", "type": "default", "factor": 1.0}, "iLLaDA")
    return native(config, LlamaForCausalLM, "iLLaDA")


ILLADA = Family(
    name="illada",
    architectures=("ILLaDAForCausalLM",),
    model_class=LlamaForCausalLM,
    to_native=illada_config,
    releases=RELEASES,
    checkpoints=(
        Published("GSAI-ML/iLLaDA-8B-Base", "Apache-2.0"),
        Published("GSAI-ML/iLLaDA-8B-Instruct", "Apache-2.0"),
    ),
    verified="by configuration; official code read",
    note="Its sampler appends blocks of 32 until an end token; here `length=` may add blocks.",
)
STABLE_DIFFCODER = Family(
    name="stable_diffcoder",
    architectures=("StableDiffcoderForCausalLM",),
    model_class=LlamaForCausalLM,
    to_native=partial(native, kind=LlamaForCausalLM, name="Stable-DiffCoder"),
    mask_kind="block_causal",
    block_length=4,
    releases=RELEASES,
    checkpoints=(
        Published("ByteDance-Seed/Stable-DiffCoder-8B-Base", "MIT"),
        Published("ByteDance-Seed/Stable-DiffCoder-8B-Instruct", "MIT"),
    ),
    verified="by configuration; official code read: transformers' own Llama under a mask",
)
