"""Activations whose bits do not depend on how many numbers there are.

On a CPU PyTorch computes sigmoid, SiLU and GELU a vector at a time, and the numbers behind the last
whole vector, or where the parts of two threads meet, one by one with another exponential: a row's
last bits would depend on how many rows there are.  Its `exp`, `tanh` and `erfc` treat all alike.
"""

import math

import torch
from torch.nn import functional as F


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) of any shape and floating dtype, in float32 at least."""
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return torch.sigmoid(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.neg(wide).exp_().add_(1).reciprocal_().to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)) of any shape and floating dtype, in float32 at least."""
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return F.silu(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    result = torch.neg(wide).exp_().add_(1)
    return torch.div(wide, result, out=result).to(x.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU of any shape and floating dtype, in float32 at least."""
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return F.gelu(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * -math.sqrt(0.5)).erfc_().mul_(0.5).mul_(wide).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU, approximated by tanh, of any shape and floating dtype, in float32 at least."""
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return F.gelu(x, approximate="tanh")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    result = (wide * wide).mul_(0.044715).add_(1).mul_(wide).mul_(math.sqrt(2 / math.pi))
    return result.tanh_().add_(1).mul_(0.5).mul_(wide).to(x.dtype)
