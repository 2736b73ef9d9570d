"""Rotation and scatter in plain PyTorch."""

from __future__ import annotations

import torch


def rotate_scatter(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """As `dllm.kernels.rotation.rotate_scatter`."""
    cos, sin = cos.float(), sin.float()
    written = (slots >= 0).nonzero().flatten()
    at = slots[written]
    keys.index_copy_(1, at, _turned(k, cos, sin)[:, written].to(keys.dtype))
    values.index_copy_(1, at, v[:, written].to(values.dtype))
    return _turned(q, cos, sin).to(keys.dtype)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x = x.float()
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
