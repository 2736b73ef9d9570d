"""Feed-forward layers whose first two products share the rounding of their input, and whose
activations do not depend on how many rows there are."""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..kernels.activations import gelu_tanh, silu
from ..kernels.cpu import layers, library
from ..kernels.quantised import QuantisedLinear, together
from .forwards import classes, replace_forwards

SILU = ("SiLU", "SiLUActivation")


def round_once(hf: PreTrainedModel) -> None:
    """Let the feed-forward layers of ``hf`` round their input once, and use the activations of
    `dllm.kernels.activations`.  Changes them in place."""
    replace_forwards(hf, classes("MLP"), _forward)
    kinds = ["torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation"]
    replace_forwards(hf, kinds, _silu)
    replace_forwards(hf, ["transformers.activations.GELUTanh"], _gelu_tanh)


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    if isinstance(module.gate_proj, QuantisedLinear):
        gate, up = together(x, (module.gate_proj, module.up_proj))
    else:
        gate, up = module.gate_proj(x), module.up_proj(x)
    if library() and type(module.act_fn).__name__ in SILU and layers.suits(gate, up):
        gated = layers.silu_times(gate, up)
    else:
        gated = module.act_fn(gate) * up
    result: torch.Tensor = module.down_proj(gated)
    return result


def _silu(_: Any, x: torch.Tensor) -> torch.Tensor:
    return silu(x)


def _gelu_tanh(_: Any, x: torch.Tensor) -> torch.Tensor:
    return gelu_tanh(x)
