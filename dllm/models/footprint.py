"""How much memory a checkpoint needs, from its ``config.json`` alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..kernels.linear import available, dtypes
from .checkpoint import Checkpoint
from .fields import own_section
from .gguf import held_bytes, open_gguf
from .headers import blueprint, stored_dtype
from .linears import room_for
from .precision import auto_dtype, native_bfloat16
from .quantisation import are_experts, layers_of, matrices, of_config, read
from .reading import family_of, native_config

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes per number
HEADROOM = 1.1  # activations, allocator, runtime


@dataclass(frozen=True)
class Footprint:
    """Sizes in bytes.  ``keys_values``: a key/value cache of one row over the whole context.
    ``copies``: of linear layers and experts in the order a CPU multiplies, held beside weights that
    were cast or put together; those that are mapped from a file can go (`dllm.models.linears`).
    ``read``: parameters that a forward reads; ``active``: those that a position is multiplied with.
    """

    parameters: int
    dtype: str
    weights: int
    context: int
    keys_values: int
    rounded: Mapping[str, int] = field(default_factory=dict)  # weights as int8, int4
    copies: int = 0
    layers: int = 0
    read: int = 0
    active: int = 0

    @property
    def needed(self) -> int:
        """Weights, their copies and one full row, with some headroom."""
        return int((self.weights + self.copies + self.keys_values) * HEADROOM)

    def weights_in(self, bits: int) -> int:
        """Bytes of the weights at another width."""
        return self.rounded.get(f"int{bits}", self.parameters * bits // 8)


def footprint(checkpoint: Checkpoint) -> Footprint:
    """Sizes of ``checkpoint`` in the dtype that `dllm.load` gives it.

    Raises `CheckpointError` when no family reads it, or its config is incomplete.
    """
    family = family_of(checkpoint)
    config, _ = native_config(checkpoint, family)
    network = blueprint(family, config, checkpoint.name)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    dtype = loaded_dtype(checkpoint, parameters)
    width = WIDTHS[dtype]
    stored = of_config(getattr(config, "quantization_config", None))
    held = parameters * width if stored is None else rounded_bytes(network, stored, width)
    ways = {name: rounded_bytes(network, read(name), width) for name in ("int8", "int4")}
    cast = stored is None and dtype != stored_dtype(checkpoint)
    head = network.get_output_embeddings() if family.self_conditioning else None  # not copied
    whole = family.self_conditioning or own_section(checkpoint.config)  # experts, in the files
    copies = copied_bytes(network, dtype, head, cast) if cast or not (stored or whole) else 0
    return _of_network(network, dtype, held, ways, copies)


def gguf_footprint(file: Path) -> tuple[Footprint, str]:
    """Sizes of a GGUF file as `dllm.load` holds its numbers, and the name of its family.

    Raises like `open_gguf`.
    """
    network, family, _, tensors = open_gguf(file)
    dtype = "bfloat16" if native_bfloat16() else "float32"
    return _of_network(network, dtype, held_bytes(network, tensors, WIDTHS[dtype]), {}, 0), family


def _of_network(
    network: Any, dtype: str, weights: int, ways: Mapping[str, int], copies: int
) -> Footprint:
    text: Any = network.config.get_text_config()
    context = int(getattr(text, "max_position_embeddings", None) or 0)
    each = text.per_layer_config if text.is_heterogeneous else [text] * text.num_hidden_layers
    keys_values = 2 * sum(map(_key_size, each)) * context * WIDTHS[dtype]
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Footprint(
        parameters, dtype, weights, context, keys_values, ways, copies, len(each),
        *_used(network, text),
    )  # fmt: skip


def _used(network: Any, text: Any) -> tuple[int, int]:
    """Parameters that a forward reads, and those that one position is multiplied with.  Many
    positions read every expert."""
    table = network.get_input_embeddings().weight
    head = network.get_output_embeddings()
    read = active = 0 if head is not None and head.weight is table else -table.numel()
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None)
    for parameter in network.parameters():
        read += parameter.numel()
        experts = parameter.shape[0] if parameter.ndim == 3 and chosen else 1
        active += parameter.numel() * (chosen if experts > 1 else 1) // experts
    return read, active


def _key_size(layer: Any) -> int:
    """Numbers of a position's keys in a layer; 0 in a network without attention."""
    queries = getattr(layer, "num_attention_heads", None) or 0
    heads: int = getattr(layer, "num_key_value_heads", None) or queries
    size: int = getattr(layer, "head_dim", None) or (layer.hidden_size // queries if queries else 0)
    return heads * size


def copied_bytes(network: Any, dtype: str, head: Any = None, cast: bool = True) -> int:
    """Bytes of the copies that `pack_linears` has made of the experts of ``network`` and, where it
    was ``cast``, of its layers but its ``head``."""
    if not available() or getattr(torch, dtype) not in dtypes():
        return 0
    layers = [
        m for m in network.modules()
        if are_experts(m) or (cast and type(m) is nn.Linear and m is not head)
    ]  # fmt: skip
    copies = WIDTHS[dtype] * sum(each.numel() for layer in layers for each in matrices(layer))
    return copies if room_for(copies) else 0


def rounded_bytes(network: Any, how: Any, width: int) -> int:
    """Bytes of the weights rounded as ``how`` says, ``width`` bytes for each of the others."""
    total: int = width * sum(parameter.numel() for parameter in network.parameters())
    head = network.get_output_embeddings()
    if head is not None and head.weight is network.get_input_embeddings().weight and how.head:
        total += width * head.weight.numel()  # one matrix becomes two
    for _, layer, bits in layers_of(network, how):
        for weight in matrices(layer):
            size = weight.numel()
            scales = 2 * size // how.group if bits == 4 else size // weight.shape[-1]
            total -= size * width - size * bits // 8 - width * scales
    return total


def loaded_dtype(checkpoint: Checkpoint, parameters: int) -> str:
    """The dtype of the loaded weights: as stored, or what `dllm.load` makes of it here."""
    if checkpoint.bundled:
        return "float32"
    stored = stored_dtype(checkpoint)
    if torch.cuda.is_available():
        return stored
    return str(auto_dtype(checkpoint.name, stored, parameters)).removeprefix("torch.")
