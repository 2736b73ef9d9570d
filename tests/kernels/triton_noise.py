"""The noise of Triton's kernels on its own, to be compared with that of NumPy."""

import torch
import triton
import triton.language as tl

from dllm.kernels.noise.triton import group_words

BLOCK = 1024


@triton.jit
def _row_bits(keys, out, rows, low, high, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64)
    group = low // 4 + tl.program_id(1) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    words = group_words(keys, row, row < rows, group)
    token = (low // 4 + tl.program_id(1) * (BLOCK // 4)) * 4 + tl.arange(0, BLOCK)[None, :]
    at = row[:, None] * (high - low) + token - low
    tl.store(out + at, words.to(tl.int64), mask=(token >= low) & (token < high))


def bits(keys: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """32 random bits for token ids [low, high) of every row: (R, high - low) int64 < 2**32."""
    out = torch.empty(len(keys), high - low, dtype=torch.int64, device=keys.device)
    if out.numel():
        grid = (len(keys), triton.cdiv(high - low // 4 * 4, BLOCK))
        _row_bits[grid](keys.contiguous(), out, len(keys), low, high, BLOCK=BLOCK)
    return out
