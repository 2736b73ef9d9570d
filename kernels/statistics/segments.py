"""Classes of tokens in Triton: each program reads the logits of one class in one row.

What the numbers mean is said in `classes`, whose functions in torch take several passes.
"""

import torch
import triton
import triton.language as tl

from .tiles import _INF, _LOWEST, _NONE, key_logit, key_token, to_key

BLOCK = 256  # tokens at a time
_FAR = tl.constexpr(-1e30)


@triton.jit
def log_sum(total, top, scale):
    """The logarithm of a sum of multiples of exp(top / scale), -inf of none."""
    some = total > 0
    return tl.where(
        some, tl.log(tl.where(some, total, 1.0)) + tl.where(some, top, 0) / scale, -_INF
    )


@triton.jit
def fold(x_ptr, noisy_ptr, columns_ptr, bounds_ptr, best_ptr, at_ptr, total_ptr, warm_ptr,
         count, stride, scale, temperature,
         NOISE: tl.constexpr, WARM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Of segment ``program_id(1)`` in row ``program_id(0)``: the largest value and where it stands,
    the logarithms of the sums of exp(x / scale) and exp(x / temperature)."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low, high = tl.load(bounds_ptr + segment), tl.load(bounds_ptr + segment + 1)
    key, top = tl.full([], _NONE, tl.int64), tl.full([], _LOWEST, tl.float32)
    total, warm = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    for first in range(low, high, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < high
        column = tl.load(columns_ptr + place, mask=inside, other=0)
        x = tl.load(x_ptr + row * stride + column, mask=inside, other=-_INF)
        value = x
        if NOISE:
            value = tl.load(noisy_ptr + row * stride + column, mask=inside, other=-_INF)
        keys = tl.where(inside, to_key(value, place.to(tl.int32)), _NONE)
        key = tl.maximum(key, tl.max(keys, 0))
        before = top
        top = tl.maximum(top, tl.max(x, 0))
        moved, away = tl.maximum(before - top, _FAR), x - top
        total = total * tl.exp(moved / scale) + tl.sum(tl.exp(away / scale), 0)
        if WARM:
            warm = warm * tl.exp(moved / temperature) + tl.sum(tl.exp(away / temperature), 0)
    here = row * count + segment
    tl.store(best_ptr + here, key_logit(key))
    tl.store(at_ptr + here, key_token(key))
    tl.store(total_ptr + here, log_sum(total, top, scale))
    if WARM:
        tl.store(warm_ptr + here, log_sum(warm, top, temperature))


def folded(
    x: torch.Tensor, noisy: torch.Tensor | None, columns: torch.Tensor, first: torch.Tensor,
    scale: float, temperature: float, warm: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The fields of `classes.Folded` for a cut with these ``columns`` and ``first`` ones."""
    x, rows, count = x.contiguous(), len(x), len(first)
    other = x if noisy is None else noisy.contiguous()
    best, total, warmer = x.new_empty((3, rows, count)).unbind(0)
    at = torch.empty((rows, count), dtype=torch.int64, device=x.device)
    bounds = torch.cat([first, first.new_tensor([len(columns)])])
    with torch.cuda.device_of(x):  # Triton launches on the present device
        fold[(rows, count)](
            x, other, columns, bounds, best, at, total, warmer, count, x.stride(0), scale,
            temperature, NOISE=noisy is not None, WARM=warm, BLOCK=BLOCK,
        )  # fmt: skip
    return best, at, total, warmer if warm else None
