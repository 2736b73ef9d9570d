"""Feed-forward layers whose rows do not depend on how many there are."""

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..kernels.activations import gelu, gelu_tanh, sigmoid, silu
from ..kernels.cpu import layers, library
from ..kernels.linear import Packed, linear
from .forwards import classes, replace_forwards

ROUTERS = (
    "qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter",
    "glm4_moe.modeling_glm4_moe.Glm4MoeTopkRouter",
)
SILU = ("SiLU", "SiLUActivation")
REPLACEMENTS = {
    "torch.nn.modules.activation.SiLU": silu,
    "transformers.activations.SiLUActivation": silu,
    "transformers.activations.GELUActivation": gelu,
    "transformers.activations.GELUTanh": gelu_tanh,
}


def replace_feed_forward(hf: PreTrainedModel) -> None:
    """Let the feed-forward layers of ``hf`` use the activations of `dllm.kernels.activations`.
    Changes them in place."""
    replace_forwards(hf, classes("MLP"), _forward)
    for module in hf.modules():
        kind = type(module)
        alike = REPLACEMENTS.get(f"{kind.__module__}.{kind.__qualname__}")
        if alike is not None and "forward" not in module.__dict__:
            module.forward = alike
    replace_forwards(hf, [f"transformers.models.{name}" for name in ROUTERS], _router)


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    if library() and type(module.act_fn).__name__ in SILU and layers.suits(gate, up):
        gated = layers.silu_times(gate, up)
    else:
        gated = module.act_fn(gate) * up
    result: torch.Tensor = module.down_proj(gated)
    return result


class RowIndependent(TorchFunctionMode):
    """Products and sigmoids of routers by functions that treat all rows alike."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return linear(args[0], args[1], None, Packed(copy=False))
        return (sigmoid if func is torch.Tensor.sigmoid else func)(*args, **(kwargs or {}))


def _router(module: Any, x: torch.Tensor) -> Any:
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return type(module).forward(module, x)
    with RowIndependent():
        return type(module).forward(module, x)
