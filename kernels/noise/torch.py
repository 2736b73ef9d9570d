"""Philox4x32-10 in int64 arithmetic on any device: the same bits as `naive`, a row at a time.

Rows are named by ``keys`` (R, 4) int64 = (seed, stream, position, step); the columns are the
token ids of a range.  Temporary memory is bounded, whatever the size of the result.  Gumbel noise
on a CPU comes from compiled kernels where there are some, with the same bits.
"""

from collections.abc import Callable

import torch

from ..cpu import library
from .naive import BELOW_ONE, MASK, MULTIPLIERS, ROUNDS, WEYL

GROUPS = 1 << 15  # counters worked on at once: some ten int64 arrays of this size, 2.5 MB
DEVICE_GROUPS = 1 << 18  # off the CPU, where launches cost more than caches save: 20 MB


def bits(keys: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """32 random bits for token ids [low, high) of every row: (R, high - low) int64 < 2**32."""
    return _filled(keys, low, high, torch.int64, lambda words: words)


def gumbel(keys: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Standard Gumbel noise for token ids [low, high) of every row, float32, always finite."""
    drawn = _compiled(keys, None, low, high - low)
    if drawn is not None:
        return _gumbel(drawn)
    return _filled(keys, low, high, torch.float32, to_gumbel)


def gumbel_at(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise for the ids ``tokens`` (R, n) of every row, float32."""
    drawn = _compiled(keys, tokens, 0, tokens.shape[1])
    if drawn is not None:
        return _gumbel(drawn)
    words = _words(keys, tokens >> 2).view(*tokens.shape, 4)
    return to_gumbel(words.gather(2, (tokens & 3).unsqueeze(2)).squeeze(2))


def to_uniform(words: torch.Tensor) -> torch.Tensor:
    """32-bit words (int64) as float32 in (0, 1)."""
    return words.to(torch.float32).add_(0.5).mul_(2**-32).clamp_(max=BELOW_ONE)


def to_gumbel(words: torch.Tensor) -> torch.Tensor:
    """32-bit words (int64) as float32 Gumbel noise."""
    return _gumbel(to_uniform(words))


def _gumbel(drawn: torch.Tensor) -> torch.Tensor:
    # The uniform number is the upper tail (w = 1 - u): large noise comes from small w, where
    # float32 is fine-grained and -log1p(-w) cannot reach zero, so the noise is never +inf.
    return drawn.neg_().log1p_().neg_().log_().neg_()


def _compiled(
    keys: torch.Tensor, tokens: torch.Tensor | None, low: int, n: int
) -> torch.Tensor | None:
    """Uniform numbers (R, n) by compiled kernels, of ``tokens`` or of ``n`` ids from ``low`` on;
    None where there are none."""
    kernels = library() if keys.device.type == "cpu" else None
    if kernels is None:
        return None
    keys, tokens = keys.contiguous(), None if tokens is None else tokens.long().contiguous()
    result = keys.new_empty((len(keys), n), dtype=torch.float32)
    kernels.dllm_uniform(
        keys.data_ptr(), None if tokens is None else tokens.data_ptr(), len(keys), low, n,
        result.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return result


def _filled(
    keys: torch.Tensor, low: int, high: int, dtype: torch.dtype,
    transform: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    out = torch.empty(len(keys), high - low, dtype=dtype, device=keys.device)
    most = GROUPS if keys.device.type == "cpu" else DEVICE_GROUPS
    width = min((high + 3) // 4 - low // 4, most)
    rows = max(1, most // max(width, 1))
    for first in range(0, len(keys), rows):
        part = keys[first : first + rows]
        for group in range(low // 4, (high + 3) // 4, max(width, 1)):
            end = min(group + width, (high + 3) // 4)
            words = transform(_words(part, torch.arange(group, end, device=keys.device)))
            start, stop = max(low, 4 * group), min(high, 4 * end)
            out[first : first + rows, start - low : stop - low] = words[
                :, start - 4 * group : stop - 4 * group
            ]
    return out


def _words(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Words of ``counters`` (G,), or (R, G) own ones of every row: (R, 4 * G) int64."""
    rows, groups = len(keys), counters.shape[-1]
    seed, stream, position, step = keys.unbind(1)
    # x = (c0, c2) and y = (c1, c3).  Words are kept in int64: the product of two 32-bit words
    # wraps to the right 64 bits, and only x has to be cleaned of what lies above its 32.
    x = torch.empty((2, rows, groups), dtype=torch.int64, device=keys.device)
    y, product = torch.empty_like(x), torch.empty_like(x)
    x[0] = counters & MASK
    x[1] = (step & MASK)[:, None]
    y[0] = (position & MASK)[:, None]
    y[1] = (stream & MASK)[:, None]
    here, there = (y, *y.unbind(0)), (product, *product.unbind(0))
    x0, x1 = x.unbind(0)
    halves = torch.stack([seed & MASK, (seed >> 32) & MASK])
    weyl = torch.tensor(WEYL, device=seed.device).view(1, 2, 1)
    rounds = torch.arange(ROUNDS, device=seed.device).view(-1, 1, 1)
    for k in ((halves + rounds * weyl) & MASK).unsqueeze(-1).unbind(0):  # the key of every round
        product, product0, product1 = there
        torch.mul(x1, MULTIPLIERS[1], out=product0)
        torch.mul(x0, MULTIPLIERS[0], out=product1)
        torch.bitwise_right_shift(product, 32, out=x)
        x.bitwise_xor_(here[0]).bitwise_xor_(k).bitwise_and_(MASK)
        here, there = there, here
    words = x.new_empty((rows, groups, 2, 2))  # (c0, c1), (c2, c3)
    words[..., 0].copy_(x.permute(1, 2, 0))
    words[..., 1].copy_(here[0].permute(1, 2, 0))
    return words.bitwise_and_(MASK).view(rows, 4 * groups)
