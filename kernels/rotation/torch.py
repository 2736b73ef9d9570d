"""Rotation and scatter in plain PyTorch."""

from __future__ import annotations

import torch


def rotate_scatter(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """As `dllm.kernels.rotation.rotate_scatter`."""
    keys.index_copy_(1, slots, _turned(k, cos, sin).to(keys.dtype))
    values.index_copy_(1, slots, v.to(values.dtype))
    return _turned(q, cos, sin).to(keys.dtype)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x = x.to(torch.promote_types(x.dtype, cos.dtype))  # once, not in every product
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
