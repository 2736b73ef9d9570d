"""Rotation and scatter in plain PyTorch."""

from __future__ import annotations

import torch


def rotate_scatter(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """As `dllm.kernels.rotation.rotate_scatter`.  Queries and keys turn together: few rows cost by
    the operation, not by the number."""
    x = torch.cat([q, k]).to(torch.promote_types(q.dtype, cos.dtype))  # once, not per product
    first, second = x.chunk(2, dim=-1)
    turned = (x * cos + torch.cat([-second, first], dim=-1) * sin).to(keys.dtype)
    keys.index_copy_(1, slots, turned[len(q) :])
    values.index_copy_(1, slots, v.to(values.dtype))
    return turned[: len(q)]
