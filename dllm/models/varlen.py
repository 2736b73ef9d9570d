"""All rows of a packed step in one call of FlashAttention's variable-length kernel.

The kernel wants the queries of all rows end to end, which they are, and where each row's keys lie.
Keys that are ranges of the buffer stay where they are, gaps between them and all, where the kernel
takes used lengths beside offsets (``seqused_k``: PyTorch's own kernel and FlashAttention 3).
Otherwise they are gathered, unless they lie end to end and fill the buffer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.transfer import upload
from .segments import Segment

Kernel = Callable[..., Any]
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the queries and keys of each row of a step lie, on the host: ``ends`` of the queries,
    which lie end to end; ``starts`` and ``used``, the first of a row's keys and how many there
    are, among those that ``index`` (K,) int64 names, or among all where it is None."""

    ends: list[int]
    starts: list[int]
    used: list[int]
    index: Tensor | None = None

    @classmethod
    def of(cls, segments: Sequence[Segment], slots: int, device: torch.device) -> Self | None:
        """Of segments over ``slots`` keys; None where queries leave gaps or keys are masked."""
        ends, starts, used = list[int](), list[int](), list[int]()
        ranges, at = True, 0
        for segment in segments:
            if segment.queries.start != at or segment.mask is not None:
                return None
            keys, rows = segment.keys, segment.rows
            count, begun, at = (segment.queries.stop - at) // rows, at, segment.queries.stop
            low, high = keys.indices(slots)[:2] if isinstance(keys, slice) else (0, len(keys))
            ranges = ranges and isinstance(keys, slice)
            ends += (begun + (row + 1) * count for row in range(rows))
            starts += (low + row * segment.key_stride for row in range(rows))
            used += [high - low] * rows
        result = cls(ends, starts, used)
        return result if ranges else result.gathered(segments, slots, device)

    def gathered(self, segments: Sequence[Segment], slots: int, device: torch.device) -> Self:
        """The same with the keys of all rows one after the other."""
        index = torch.cat([
            own + row * segment.key_stride
            for segment in segments
            for own in [_indices(segment.keys, slots, device)]
            for row in range(segment.rows)
        ])  # fmt: skip
        return type(self)(self.ends, [0, *accumulate(self.used)][:-1], self.used, index)

    @property
    def longest(self) -> int:
        return max(end - begin for begin, end in zip([0, *self.ends], self.ends, strict=False))


def _indices(keys: slice | Tensor, slots: int, device: torch.device) -> Tensor:
    """``keys`` as (n,) int64."""
    if isinstance(keys, Tensor):
        return keys.to(device)
    return torch.arange(*keys.indices(slots)[:2], device=device)


@dataclass(frozen=True, slots=True)
class Borders:
    """`Spans` as a kernel wants them.  ``queries`` (rows + 1,) int32 are running sums of lengths;
    so are ``keys`` where ``used`` is None.  With ``used`` (rows,) int32, ``keys`` are where each
    row's keys begin.  ``most_keys`` is no less than any row's number of keys."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    index: Tensor | None = None
    used: Tensor | None = None

    @classmethod
    def of(cls, spans: Spans, slots: int, device: torch.device, offsets: bool) -> Self:
        """``slots``: how many keys there are.  ``offsets``: whether the kernel takes offsets and
        used lengths; else keys have to lie end to end."""
        keys = [*spans.starts, slots] if offsets else [0, *accumulate(spans.used)]
        lists = [[0, *spans.ends], keys, spans.used]
        up = upload([np.array(each, np.int32) for each in lists], device)
        return cls(
            up[0], up[1], spans.longest, max(spans.used), spans.index, up[2] if offsets else None
        )


def in_pytorch(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float | None, causal: bool,
    seqused_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """FlashAttention 2 as PyTorch has it; on other devices than a GPU a call for each row.

    As ``flash_attn_varlen_func`` takes them: ``q`` (Q, H, dh), ``k``, ``v`` (S, Hkv, dh).
    """
    if q.is_cuda:
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False,
            scale=softmax_scale, seqused_k=seqused_k,
        )[0]  # fmt: skip
        return out
    out, ends = torch.zeros_like(q), cu_seqlens_q.tolist()
    used = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    for row, (start, count) in enumerate(zip(cu_seqlens_k.tolist(), used.tolist(), strict=False)):
        here, there = slice(ends[row], ends[row + 1]), slice(start, start + count)
        own, keys, values = (x.transpose(0, 1)[None] for x in (q[here], k[there], v[there]))
        rows = F.scaled_dot_product_attention(
            own, keys, values, scale=softmax_scale, enable_gqa=True
        )
        out[here] = rows[0].transpose(0, 1)
    return out


@cache
def _flash(device: torch.device) -> bool:
    """Whether PyTorch has FlashAttention with used lengths for this device."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


class Varlen:
    """Attends packed rows with ``flash_attn_varlen_func`` of ``package``, imported at the first
    call, or with PyTorch's kernel where that is None."""

    def __init__(self, package: str | None = None, kernel: Kernel | None = None) -> None:
        self.package, self._kernel = package, kernel
        self._last: tuple[Sequence[Segment], Borders | None, tuple[int, torch.device]] | None = None
        self._offsets: bool | None = None

    def suits(self, v: Tensor, size: int) -> bool:
        """Whether the kernel takes values like ``v`` (..., dh), with queries of ``size``."""
        if v.dtype not in HALVES or v.shape[-1] != size:
            return False
        return self.package is not None or (_flash(v.device) and size % 8 == 0 and size <= 256)

    @property
    def offsets(self) -> bool:
        """Whether the kernel takes offsets and used lengths."""
        if self._offsets is None:
            self._offsets = "seqused_k" in signature(self._function()).parameters
        return self._offsets

    def _function(self) -> Kernel:
        if self._kernel is None:
            given = self.package and import_module(self.package).flash_attn_varlen_func
            self._kernel = given or in_pytorch
        return self._kernel

    def borders(
        self, segments: Sequence[Segment], slots: int, device: torch.device
    ) -> Borders | None:
        """The same for every layer of a step on a device: worked out at the first."""
        last, place = self._last, (slots, device)
        if last is None or last[0] is not segments or last[2] != place:
            spans, result = Spans.of(segments, slots, device), None
            if spans is not None:
                ends = [0, *accumulate(spans.used)]
                if not self.offsets and (spans.starts != ends[:-1] or ends[-1] != slots):
                    spans = spans.gathered(segments, slots, device)
                count = slots if spans.index is None else len(spans.index)
                result = Borders.of(spans, count, device, self.offsets)
            last = self._last = (segments, result, place)
        return last[1]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment] | Borders,
        scaling: float | None,
    ) -> Tensor | None:  # fmt: skip
        """(1, Q, H, dh), or None for segments that have to be called one by one.

        ``q`` (1, H, Q, dh), ``k``, ``v`` (1, Hkv, S, dh).
        """
        if isinstance(segments, Borders):
            borders: Borders | None = segments
        else:
            borders = self.borders(segments, k.shape[2], k.device)
            if borders is None or int(segments[-1].queries.stop) != q.shape[2]:
                return None
        assert borders is not None
        used = {} if borders.used is None else {"seqused_k": borders.used}
        keys, values = k[0].transpose(0, 1), v[0].transpose(0, 1)
        if borders.index is not None:
            keys, values = keys[borders.index], values[borders.index]
        result = self._function()(
            q[0].transpose(0, 1), keys, values,  # views: only the last axis has to be dense
            cu_seqlens_q=borders.queries, cu_seqlens_k=borders.keys,
            max_seqlen_q=borders.most_queries, max_seqlen_k=borders.most_keys,
            softmax_scale=scaling, causal=False, **used,
        )  # fmt: skip
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out[None]
