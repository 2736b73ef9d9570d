"""Rotation and scatter in plain PyTorch."""

import torch

MANY = 1 << 16  # numbers from which on the temporary ones cost more than the operations


def rotate_scatter(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """As `dllm.kernels.rotation.rotate_scatter`.  Few queries and keys turn together, because every
    operation costs as much as its numbers; many turn apart, and in place."""
    if q.numel() > MANY:
        turned = _turned_in_place(q, cos, sin).to(keys.dtype)
        kept = _turned_in_place(k, cos, sin).to(keys.dtype)
    else:
        both = torch.cat([q, k])
        both = both.to(torch.promote_types(both.dtype, cos.dtype))  # once, not per product
        first, second = both.chunk(2, dim=-1)
        both = (both * cos + torch.cat([-second, first], dim=-1) * sin).to(keys.dtype)
        turned, kept = both[: len(q)], both[len(q) :]
    keys.index_copy_(1, slots, kept)
    values.index_copy_(1, slots, v.to(values.dtype))
    return turned


def _turned_in_place(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x = x.to(torch.promote_types(x.dtype, cos.dtype))
    turned, half = x * cos, x.shape[-1] // 2
    turned[..., :half] -= x[..., half:] * sin[..., :half]
    turned[..., half:] += x[..., :half] * sin[..., half:]
    return turned
