"""RMSNorm layers with fewer operations: the same numbers, or a compiled kernel."""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ..kernels.cpu import layers, library
from .forwards import classes, replace_forwards


def shorten_norms(hf: PreTrainedModel) -> None:
    """Let RMSNorm layers of ``hf`` use PyTorch's own where it gives the same numbers, in place."""
    replace_forwards(hf, classes("RMSNorm"), _forward)


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """``x`` (..., D) normed in float32, rounded, then scaled, as transformers does it."""
    if torch.is_grad_enabled():
        result: torch.Tensor = type(module).forward(module, x)
        return result
    if library() and layers.suits(x, module.weight):
        return layers.rms_norm(x, module.weight, module.variance_epsilon)
    wide = x.float() if x.device.type == "cpu" else x  # a GPU's kernel does so by itself
    normed = F.rms_norm(wide, (x.shape[-1],), None, module.variance_epsilon)
    scaled: torch.Tensor = module.weight * normed.to(x.dtype)
    return scaled
