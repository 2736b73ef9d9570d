"""Activations whose bits do not depend on how many numbers there are.

On a CPU PyTorch computes sigmoid, SiLU and GELU by tanh a vector at a time, and the numbers behind
the last whole vector, or where the parts of two threads meet, one by one with another exponential:
a row's last bits would depend on how many rows there are.  Its `exp` and `tanh` treat all alike.
"""

import math

import torch
from torch.nn import functional as F


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) of any shape and floating dtype, computed in float32."""
    if _left_to_pytorch(x):
        return torch.sigmoid(x)
    return torch.neg(x.float()).exp_().add_(1).reciprocal_().to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)) of any shape and floating dtype, computed in float32."""
    if _left_to_pytorch(x):
        return F.silu(x)
    wide = x.float()
    result = torch.neg(wide).exp_().add_(1)
    return torch.div(wide, result, out=result).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU, approximated by tanh, of any shape and floating dtype, computed in float32."""
    if _left_to_pytorch(x):
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    result = (wide * wide).mul_(0.044715).add_(1).mul_(wide).mul_(math.sqrt(2 / math.pi))
    return result.tanh_().add_(1).mul_(0.5).mul_(wide).to(x.dtype)


def _left_to_pytorch(x: torch.Tensor) -> bool:
    return (
        x.device.type != "cpu"
        or x.dtype == torch.float64
        or torch.is_grad_enabled()
        or torch.compiler.is_compiling()
    )
