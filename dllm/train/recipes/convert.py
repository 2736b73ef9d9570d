"""An autoregressive model with attention that is causal between blocks, to be trained."""

import copy
from dataclasses import replace
from typing import Any

from ...core.errors import ConfigError
from ...models import DiffusionModel, load
from ..dflash.recipe import mask_id

IN_BLOCKS = {  # families of networks that attend in blocks
    "LlamaForCausalLM": "a2d_llama", "Qwen2ForCausalLM": "a2d_qwen2",
    "Qwen3ForCausalLM": "a2d_qwen3",
}  # fmt: skip


def in_blocks(model: DiffusionModel, block: int, mask_token_id: int | None) -> DiffusionModel:
    """A copy of an autoregressive model with attention that is causal between blocks of ``block``
    tokens, as OPDLM's: weights to train, no model to use yet."""
    family = IN_BLOCKS.get(type(model.hf).__name__)
    if model.facts.mask_kind != "causal" or family is None:
        raise ConfigError(
            f"{model.name} cannot become a model of blocks: that takes an autoregressive Llama, "
            "Qwen2 or Qwen3 network"
        )
    mask = mask_id(model, mask_token_id)
    copies: Any = copy.deepcopy((model.hf, model.tokenizer))
    hf, tokenizer = copies
    hf.generation_config.block_length = block
    result = load(hf, family=family, tokenizer=tokenizer, mask_token_id=mask, block_length=block)
    defaults = {**result.generation_defaults, "block_length": block}
    return replace(result, name=model.name, generation_defaults=defaults)
