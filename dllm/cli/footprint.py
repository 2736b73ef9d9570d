"""How much memory a checkpoint needs, from its ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..models import Family
    from ..models.checkpoint import Checkpoint

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes per number
HEADROOM = 1.1  # activations, allocator, runtime


@dataclass(frozen=True)
class Footprint:
    """Sizes in bytes.  ``keys_values``: a key/value cache of one row over the whole context."""

    parameters: int
    dtype: str
    weights: int
    context: int
    keys_values: int

    @property
    def needed(self) -> int:
        """Weights and one full row, with some headroom."""
        return int((self.weights + self.keys_values) * HEADROOM)

    def weights_in(self, bits: int) -> int:
        """Bytes of the weights at another width."""
        return self.parameters * bits // 8


def footprint(checkpoint: Checkpoint) -> Footprint:
    """Sizes of ``checkpoint`` in the dtype that `dllm.load` gives it.

    Raises `CheckpointError` when no family reads it, or its config is incomplete.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from ..models.weights import quiet

    family = family_of(checkpoint)
    config = native_config(checkpoint.config, family)
    with quiet(), torch.device("meta"):  # shapes without numbers
        network = (
            AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            if family.model_class is None
            else family.model_class(config)
        )
    parameters = sum(parameter.numel() for parameter in network.parameters())
    dtype = stored_dtype(checkpoint)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    context = int(config.max_position_embeddings)
    numbers = 2 * config.num_hidden_layers * heads * size * context
    width = WIDTHS.get(dtype, 2)
    return Footprint(parameters, dtype, parameters * width, context, numbers * width)


def family_of(checkpoint: Checkpoint) -> Family:
    """The family that reads ``checkpoint``; `CheckpointError` when there is none."""
    from ..models.family import family_for, get_family

    config = checkpoint.config
    named = config.get("dllm", {}).get("family")
    family = get_family(named) if named else family_for(config)
    if family is None:
        architecture = (config.get("architectures") or ["(none)"])[0]
        raise CheckpointError(f"architecture {architecture!r} is not supported")
    return family


def native_config(config: Mapping[str, Any], family: Family) -> Any:
    """The transformers config that ``config`` describes."""
    from transformers import AutoConfig

    official = (config.get("architectures") or [""])[0] in family.architectures
    if official and family.to_native is not None:
        return family.to_native(config)
    if family.model_class is not None:
        native: Any = family.model_class.config_class
        return native.from_dict(dict(config))
    kind = config.get("model_type", "")
    try:
        return AutoConfig.for_model(**dict(config))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"model type {kind!r} is unknown to transformers") from error


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of the loaded weights; bundled models are widened to float32."""
    if checkpoint.bundled:
        return "float32"
    dtype = checkpoint.config.get("torch_dtype") or checkpoint.config.get("dtype") or "float32"
    return str(dtype).removeprefix("torch.")
