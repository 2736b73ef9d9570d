"""Attention of packed rows in which heads that share keys attend them together.

The H / Hkv heads of a group become queries of one head, so that keys are never repeated.  On a CPU
that takes a tenth of the time for one query of 28 heads that share 4, two thirds for eight.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.cpu import layers, library
from .segments import Segment

WIDE = 2**17  # values that are held in float64 at a time
TILE = 32  # queries that SDPA takes at a time
FEW = 4  # fewer than that in bfloat16 take twice as long
SMALL = 16**3  # products of up to so many multiplications PyTorch sums in another order


def grouped_rows(
    q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment], scale: float, exact: bool
) -> Tensor:
    """(1, Q, H, dh): every segment of ``q`` (1, H, Q, dh) over its keys in ``k``, ``v``
    (1, Hkv, S, dh).  Queries that no segment covers come out as zero; JetMoE wants views of it."""
    heads, kv = q.shape[1], k.shape[1]
    out = v.new_zeros(1, q.shape[2], heads, v.shape[-1])
    for segment in segments:
        first, last, _ = segment.queries.indices(q.shape[2])
        rows, n = segment.rows, (last - first) // segment.rows
        own = q[0, :, first:last].view(kv, heads // kv, rows, n, -1)
        folded = own.permute(2, 0, 1, 3, 4).reshape(rows, kv, heads // kv * n, -1)
        mask = None if segment.mask is None else segment.folded(heads // kv, v.dtype)
        where = segment.keys
        if rows == 1 and type(where) is slice:
            attended = grouped(folded, k[:, :, where], v[:, :, where], scale, mask, exact)
        else:
            attended = grouped(folded, segment.rows_of(k), segment.rows_of(v), scale, mask, exact)
        unfolded = attended.view(rows, kv, heads // kv, n, -1).permute(0, 3, 1, 2, 4)
        if last - first == q.shape[2]:
            return unfolded.reshape(1, rows * n, heads, -1).contiguous()
        out[0, first:last] = unfolded.reshape(rows * n, heads, -1)
    return out


def grouped(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, exact: bool
) -> Tensor:
    """Attention (R, Hkv, m, dh) of rows ``q`` (R, Hkv, m, dh) over ``k``, ``v`` (R, Hkv, L, dh).

    ``mask`` (R, m, L) is added to the scores.  ``exact``: as `exact_attention` promises; else a
    compiled kernel, where there is one, or SDPA.
    """
    if library() and layers.attends(q, k, v, mask):
        return layers.attention(q, k, v, mask, scale, exact)
    if not exact:
        added = None if mask is None else mask[:, None]
        count = q.shape[2]
        missing = FEW - count % TILE if 0 < count % TILE < FEW else 0
        if missing and q.dtype == torch.bfloat16 and q.device.type == "cpu":
            q = F.pad(q, (0, 0, 0, missing))
            added = None if added is None else F.pad(added, (0, 0, 0, missing))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale)[:, :, :count]
    return exact_rows(q, k, v, scale, mask)


def exact_rows(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """`exact_attention` (R, Hkv, m, dh) of rows, as `grouped` gets them."""
    if len(q) == 1:  # all heads in one product
        return exact_attention(q[0], k[0], v[0], scale, mask)[None]
    out = torch.empty_like(q)
    few = max(1, WIDE // (v.shape[2] * v.shape[3]))
    for first in range(0, len(q), few):
        part = slice(first, first + few)
        added = None if mask is None else mask[part]
        for h in range(q.shape[1]):
            out[part, h] = exact_attention(q[part, h], k[part, h], v[part, h], scale, added)
    return out


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Attention (N, m, dh) of ``q`` (N, m, dh) over ``k``, ``v`` (N, L, dh), each query on its own.

    In half precision on a CPU its bits do not depend on how many other queries there are, on keys
    that the ``mask`` (N or 1, m, L) hides, nor on where among those the others lie.  A score is a
    sum over dh, always in the same order; what is summed over keys (the weights, and their products
    with the values) is summed in float64, where another order changes nothing that survives
    rounding.  SDPA promises none of that.
    """
    count, each = q.shape[1], k.numel()
    if 0 < count * each <= SMALL:
        q = F.pad(q, (0, 0, 0, SMALL // each + 1 - count))
    scores = torch.bmm(q, k.transpose(1, 2))[:, :count].mul_(scale)
    if mask is not None:
        scores.add_(mask)
    return torch.bmm(scores.softmax(-1, dtype=torch.float64), v.double()).to(v.dtype)
