"""Turning a transformers model in memory into one that can be decoded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from ..core.errors import ConfigError
from ..kernels.linear import packed_of
from .attention import set_attention, use_attention
from .decoder import join_parts
from .facts import generation_defaults, read_facts
from .family import Family, get_family
from .fields import own_section
from .linears import pack_linears
from .mlp import replace_feed_forward
from .model import DiffusionModel
from .norms import shorten_norms
from .quantisation import quantise
from .reading import ambiguous_family
from .rotary import rotate_in_cache
from .tokenizer import TokenizerSource, complete_tokenizer, resolve_tokenizer


@dataclass(frozen=True)
class Wanted:
    """What the caller of `load` says about a model, whatever it is loaded from.  ``given``: facts;
    ``rounding``: how it is to be rounded, `Int8`, `Int4` or None."""

    family: str | None
    tokenizer: TokenizerSource
    given: Mapping[str, Any]
    attention: str | None
    rounding: Any
    dtype: str | torch.dtype
    device: str | torch.device | None


def adopt(hf: PreTrainedModel, wanted: Wanted) -> DiffusionModel:
    """See `load`: the case of a model that is loaded already.  It is changed in place."""
    raw = hf.config.to_dict()
    family = get_family(wanted.family) if wanted.family else _family_of(hf, raw, wanted.given)
    if family.model_class is not None and not isinstance(hf, family.model_class):
        raise ConfigError(
            f"family {family.name!r} runs on {family.model_class.__name__}, not {type(hf).__name__}"
        )
    generation = hf.generation_config.to_dict() if hf.can_generate() else {}
    tokenizer = resolve_tokenizer(wanted.tokenizer, family, None)
    facts = read_facts(
        family, hf.config, tokenizer, raw=raw, generation=generation, given=wanted.given
    )
    complete_tokenizer(tokenizer, family, facts.mask_token_id, facts.vocab_size)
    if isinstance(wanted.dtype, torch.dtype):
        hf.to(dtype=wanted.dtype)  # type: ignore[call-arg]
    if wanted.device is not None:
        hf.to(device=wanted.device)  # type: ignore[call-arg]
    prepare(hf, family, facts.block_length, wanted)
    name = Path(getattr(hf.config, "name_or_path", "")).name or type(hf).__name__
    official = own_section(raw).get("official_config") or {}
    defaults = generation_defaults(raw, generation, facts, family)
    return DiffusionModel(hf, tokenizer, family, facts, name, defaults, official)


def prepare(hf: PreTrainedModel, family: Family, block_length: int | None, wanted: Wanted) -> None:
    """Rounded weights, eval mode; for diffusion also the family's mask, its rotation and packed
    attention.  Changes ``hf`` in place."""
    if hf.device.type == "meta":
        raise ConfigError(
            "the embeddings are on device 'meta' or offloaded to disk, so that nothing can be "
            "computed: load with device='cpu', or keep them in memory by device_map"
        )
    if hasattr(hf, "ct_decompress_hook"):  # else by a call of the whole network: there is none
        hf.hf_quantizer.compressor.decompress_model(hf)  # type: ignore[operator, union-attr]
    if wanted.rounding is not None:
        quantise(hf, wanted.rounding)
    hf.train(False)
    pack_linears(hf)
    head = packed_of(hf.get_output_embeddings())  # type: ignore[no-untyped-call]
    if family.self_conditioning and head is not None:
        head.copy = False  # its weight is the embedding's, which every step reads whole
    shorten_norms(hf)
    rotate_in_cache(hf)
    replace_feed_forward(hf)
    join_parts(hf)
    _restore_frequencies(hf)
    if family.mask_kind == "causal":  # runs as it is: some networks mask only what they know
        if wanted.attention is not None:
            use_attention(hf, wanted.attention)
        return
    if family.mask_kind == "decided_first" and "flash" in (wanted.attention or ""):
        raise ConfigError(
            f"{family.name} models attend under masks, which {wanted.attention} does not take; "
            "load with attn_implementation='sdpa'"
        )
    set_attention(hf, wanted.attention or "sdpa")
    if not family.causal:
        hf.config.is_causal = False
        hf.config.use_cache = False
        module: Any
        for module in hf.modules():
            if hasattr(module, "is_causal"):
                module.is_causal, module.block_length = False, block_length
    rotary: Any = getattr(hf.base_model, "rotary_emb", None)
    if rotary and family.float32_rotation and not getattr(rotary, "rotates_in_float32", False):
        rotary.rotates_in_float32 = True
        rotary.register_forward_pre_hook(_rotate_in_float32)


def _family_of(hf: PreTrainedModel, raw: Mapping[str, Any], given: Mapping[str, Any]) -> Family:
    section = own_section(raw)
    if section.get("family"):
        return get_family(section["family"])
    mask_id = given.get("mask_token_id", raw.get("mask_token_id"))
    if mask_id is None and raw.get("is_causal", True):
        return get_family("autoregressive")
    if isinstance(hf, LlamaForCausalLM):
        return get_family("llada")
    raise ambiguous_family(type(hf).__name__)


def _restore_frequencies(hf: PreTrainedModel) -> None:
    """A model that was cast as a whole has rounded rotation frequencies: compute them again."""
    for module in hf.modules():
        kind: Any = type(module)
        if "RotaryEmbedding" not in kind.__name__ or not hasattr(module, "config"):
            continue
        held = dict(module.named_buffers(recurse=False))
        if any(x.is_floating_point() and x.dtype != torch.float32 for x in held.values()):
            for name, exact in kind(config=module.config).named_buffers(recurse=False):
                setattr(module, name, exact.to(held[name].device))


def _rotate_in_float32(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Rotary modules return cos and sin in the dtype of their first argument."""
    return (args[0].new_empty(0, dtype=torch.float32), *args[1:])
