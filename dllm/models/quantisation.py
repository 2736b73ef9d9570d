"""Weights of 8 or 4 bits: which layers of a network get them, and how a checkpoint says so.

`quantise` rounds a network in place; a folder that was saved so names ``quant_method: dllm`` in its
config.json, and transformers reads it back through `Quantiser`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..core.errors import CheckpointError, ConfigError
from ..core.registry import Registry
from ..core.spec import parse_one
from ..kernels.mapped import release
from ..kernels.quantised import (
    BLOCK,
    EVEN,
    GROUPS,
    QuantisedEmbedding,
    QuantisedExperts,
    QuantisedLinear,
)

METHOD = "dllm"  # quant_method in config.json
KINDS: Registry[Any] = Registry("quantization")


@dataclass(frozen=True)
class Rounding:
    """How a network is rounded: see `Int8` and `Int4`."""

    @property
    def bits(self) -> int:
        return 8

    def width(self, inputs: int, outputs: int) -> int:
        """Bits of the weights of a layer: 8, 4, or 0 where it stays as it is."""
        return 8 if inputs % EVEN == 0 else 0

    def group_of(self, width: int) -> int:
        """Inputs that share a scale; 0: all."""
        return 0


@KINDS.register("int8")
@dataclass(frozen=True)
class Int8(Rounding):
    """Every linear layer and expert in 8 bits, a scale per output.

    ``head`` False leaves the last layer as it is; ``embeddings`` True rounds the first table, too.
    """

    head: bool = True
    embeddings: bool = False


@KINDS.register("int4")
@dataclass(frozen=True)
class Int4(Rounding):
    """Linear layers and experts in 4 bits, a scale and a zero per ``group`` (32, 64, 128 inputs).

    The ``head``, if it is not left as it is, gets 8 bits, and so do ``embeddings``.
    """

    group: int = 64
    head: bool = True
    embeddings: bool = False

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ConfigError(f"group is {', '.join(map(str, GROUPS))}, not {self.group!r}")

    @property
    def bits(self) -> int:
        return 4

    def width(self, inputs: int, outputs: int) -> int:
        fits = inputs % self.group == 0 and outputs % BLOCK == 0
        return 4 if fits else super().width(inputs, outputs)

    def group_of(self, width: int) -> int:
        return self.group if width == 4 else 0


def read(given: Any) -> Any:
    """`Int8` or `Int4` from "int8", "int4(group=32)", or one of them."""
    return given if isinstance(given, Rounding) else parse_one(given, KINDS)


def layers_of(hf: Any, how: Any) -> Iterator[tuple[str, Any, int]]:
    """Name, layer and bits of every linear layer, all experts of a layer (and the embedding) that
    ``how`` rounds; not the routers, whose choices it would change."""
    head, first = hf.get_output_embeddings(), hf.get_input_embeddings()
    for name, module in hf.named_modules():
        linear = type(module) is nn.Linear and ".router." not in name
        if (linear and (module is not head or how.head)) or are_experts(module):
            wanted = Int8() if module is head else how
            widths = [wanted.width(each.shape[-1], each.shape[-2]) for each in matrices(module)]
            if all(widths):
                yield name, module, max(widths)
        elif module is first and type(module) is nn.Embedding and how.embeddings:
            yield name, module, 8


def are_experts(module: nn.Module) -> bool:
    """Whether it is one of transformers' classes with a 3-d tensor for all experts of a layer, and
    computes them as `QuantisedExperts` does: no biases, norms, other layouts or own gates."""
    gate = getattr(module, "_apply_gate", None)
    normed = getattr(module, "has_post_expert_norm", False)
    return (
        getattr(gate, "__name__", "") == "_default_apply_gate"
        and isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)
        and not (module.is_transposed or module.has_bias or normed)
    )


def matrices(module: Any) -> list[torch.Tensor]:
    """The weights (..., outputs, inputs) of what `layers_of` names."""
    names = ("gate_up_proj", "down_proj") if are_experts(module) else ("weight",)
    return [getattr(module, name) for name in names]


def quantise(hf: PreTrainedModel, how: Any) -> None:
    """Round the weights of ``hf`` in place, layer by layer, and note it in its config.

    Raises `ConfigError` for a network off the CPU or one that has no layer to round.
    """
    check_device(hf.device)
    chosen = list(layers_of(hf, how))
    if not chosen:
        raise ConfigError(f"{type(hf).__name__} has no linear layers that {how} could round")
    if how.head or how.embeddings:  # one matrix for both ends is two when either is rounded
        hf.config.get_text_config().tie_word_embeddings = False
        hf.config.tie_word_embeddings = False
        hf.all_tied_weights_keys = {}
    for name, layer, width in chosen:
        if isinstance(layer, nn.Embedding):
            rounded: nn.Module = QuantisedEmbedding.of(layer)
        else:
            kind = QuantisedExperts if are_experts(layer) else QuantisedLinear
            rounded = kind.of(layer, width, how.group_of(width))
        for weight in matrices(layer):
            release(weight)
        hf.set_submodule(name, rounded)
    hf.requires_grad_(False)
    hf.config.quantization_config = DllmQuantization(bits=how.bits, **asdict(how))


def parameters(network: nn.Module) -> int:
    """How many weights a network has, those that are rounded included."""
    modules = [module for module in network.modules() if isinstance(module, QuantisedLinear)]
    plain = sum(parameter.numel() for parameter in network.parameters())
    return plain + sum(module.size for module in modules)


def check_device(device: Any) -> None:
    """Raise `ConfigError` unless it is a CPU."""
    if torch.device(device or "cpu").type != "cpu":
        raise ConfigError(
            "quantization= rounds weights for a CPU; on a GPU give quantization_config= of "
            "transformers, such as BitsAndBytesConfig(load_in_8bit=True)"
        )


def of_config(config: Mapping[str, Any] | None) -> Any:
    """How a checkpoint was rounded, from its ``quantization_config``; None if not by this library.

    Raises `CheckpointError` when the entry cannot be read.
    """
    entry = config.to_dict() if isinstance(config, DllmQuantization) else dict(config or {})
    if entry.get("quant_method") != METHOD:
        return None
    bits = entry.get("bits")
    kind = Int8 if bits == 8 else Int4 if bits == 4 else None
    if kind is None:
        raise CheckpointError(f"quantization_config has bits={bits!r}: not 8 or 4")
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in entry.items() if name in names})


@register_quantization_config(METHOD)
class DllmQuantization(QuantizationConfigMixin):
    """The ``quantization_config`` of a checkpoint that this library rounded."""

    def __init__(self, **entries: Any) -> None:
        entries.pop("quant_method", None)
        self.quant_method: Any = METHOD
        self.__dict__.update(entries)


@register_quantizer(METHOD)
class Quantiser(HfQuantizer):
    """Puts rounded layers in place before transformers reads their numbers."""

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.how = of_config(quantization_config)

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> Any:
        for name, layer, width in list(layers_of(model, self.how)):
            dtype = matrices(layer)[0].dtype
            if are_experts(layer):
                new: nn.Module = QuantisedExperts(layer, width, self.how.group_of(width))
            elif isinstance(layer, nn.Embedding):
                with torch.device("meta"):
                    new = QuantisedEmbedding(layer.num_embeddings, layer.embedding_dim, dtype)
            else:
                new = QuantisedLinear.like(layer, width, self.how.group_of(width), dtype)
            model.set_submodule(name, new)
        return model

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        model.requires_grad_(False)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False
