"""iLLaDA (arXiv 2606.25331), the successor of LLaDA: a bidirectional Llama network.

It has plain names, grouped heads and tied embeddings.  Its files do not state the mask token: the
official sampler passes 5.
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
