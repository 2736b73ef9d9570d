"""All rows of a packed step in one call of FlashAttention's variable-length kernel.

The kernel wants the queries of all rows end to end, which they are, and where each row's keys lie.
Keys that are ranges of the buffer stay where they are, gaps between them and all, where the kernel
takes used lengths beside offsets (``seqused_k``, as FlashAttention 3 does).  Otherwise they are
gathered, unless they lie end to end and fill the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]
GATHERED = -1  # in the place of where keys begin that are no range


@dataclass(frozen=True, slots=True)
class Borders:
    """``queries`` (rows + 1,) int32 are running sums of lengths; so are ``keys``, of the keys that
    ``index`` (K,) int64 names, or of all in order where it is None.  With ``used`` (rows,) int32,
    ``keys`` are where each row's keys begin and ``used`` how many they are."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    index: Tensor | None = None
    used: Tensor | None = None

    @classmethod
    def of(
        cls, segments: Sequence[Any], slots: int, device: torch.device, offsets: bool = False
    ) -> Borders | None:
        """Of `attention.Segment`s over ``slots`` keys; None where their queries leave gaps.
        ``offsets``: whether the kernel takes offsets and used lengths."""
        queries, starts, used, at = [0], list[int](), list[int](), 0
        for segment in segments:
            if segment.queries.start != at or segment.mask is not None:
                return None
            count, at = (segment.queries.stop - at) // segment.rows, segment.queries.stop
            ranged = isinstance(segment.keys, slice)
            low, high = segment.keys.indices(slots)[:2] if ranged else (0, len(segment.keys))
            for row in range(segment.rows):
                queries.append(queries[-1] + count)
                starts.append(low + row * segment.key_stride if ranged else GATHERED)
                used.append(high - low)
        keys, index, in_place = [0, *accumulate(used)], None, offsets and GATHERED not in starts
        if in_place:
            keys = [*starts, slots]
        elif starts != keys[:-1] or keys[-1] != slots:
            index = torch.cat([
                own + row * segment.key_stride
                for segment in segments
                for own in [_indices(segment.keys, slots, device)]
                for row in range(segment.rows)
            ])  # fmt: skip
        return cls(
            torch.tensor(queries, dtype=torch.int32, device=device),
            torch.tensor(keys, dtype=torch.int32, device=device),
            max(b - a for a, b in pairwise(queries)), max(used), index,
            torch.tensor(used, dtype=torch.int32, device=device) if in_place else None,
        )  # fmt: skip


def _indices(keys: slice | Tensor, slots: int, device: torch.device) -> Tensor:
    """``keys`` as (n,) int64."""
    if isinstance(keys, Tensor):
        return keys
    return torch.arange(*keys.indices(slots)[:2], device=device)


class Varlen:
    """Attends packed rows with the kernel of ``package``, imported at the first call."""

    def __init__(self, package: str, kernel: Kernel | None = None) -> None:
        self.package, self._kernel = package, kernel
        self._last: tuple[Sequence[Any], int, Borders | None] | None = None
        self._offsets: bool | None = None  # whether the kernel takes them

    def borders(self, segments: Sequence[Any], slots: int, device: torch.device) -> Borders | None:
        """The same for every layer of a step: worked out at the first."""
        last = self._last
        if last is None or last[0] is not segments or last[1] != slots:
            borders = Borders.of(segments, slots, device, self._takes_offsets())
            last = self._last = (segments, slots, borders)
        return last[2]

    def _takes_offsets(self) -> bool:
        if self._offsets is None:
            self._offsets = "seqused_k" in signature(self._function()).parameters
        return self._offsets

    def _function(self) -> Kernel:
        if self._kernel is None:
            kernel: Kernel = import_module(self.package).flash_attn_varlen_func
            self._kernel = kernel
        return self._kernel

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Any], scaling: float | None
    ) -> Tensor | None:
        """(1, Q, H, dh), or None for segments that have to be called one by one.

        ``q`` (1, H, Q, dh), ``k``, ``v`` (1, Hkv, S, dh).
        """
        borders = self.borders(segments, k.shape[2], k.device)
        if borders is None or int(segments[-1].queries.stop) != q.shape[2]:
            return None
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
