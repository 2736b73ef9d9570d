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
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]


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
        if offsets and all(isinstance(segment.keys, slice) for segment in segments):
            return cls._in_place(segments, slots, device)
        queries, keys, index, at, contiguous = [0], [0], [], 0, True
        for segment in segments:
            first, last = segment.queries.start, segment.queries.stop
            if first != at or segment.mask is not None:
                return None
            at = last
            for row in range(segment.rows):
                moved = row * segment.key_stride
                if isinstance(segment.keys, slice):
                    low, high, _ = segment.keys.indices(slots)
                    own = torch.arange(low + moved, high + moved, device=device)
                    contiguous &= low + moved == keys[-1]
                else:
                    own, contiguous = segment.keys + moved, False
                index.append(own)
                queries.append(queries[-1] + (last - first) // segment.rows)
                keys.append(keys[-1] + len(own))
        whole = contiguous and keys[-1] == slots
        return cls(
            torch.tensor(queries, dtype=torch.int32, device=device),
            torch.tensor(keys, dtype=torch.int32, device=device),
            max(b - a for a, b in pairwise(queries)),
            max(b - a for a, b in pairwise(keys)),
            None if whole else torch.cat(index),
        )  # fmt: skip

    @classmethod
    def _in_place(cls, segments: Sequence[Any], slots: int, device: torch.device) -> Borders | None:
        """Of segments whose keys are ranges."""
        queries, starts, used, at = [0], [], [], 0
        for segment in segments:
            if segment.queries.start != at or segment.mask is not None:
                return None
            count, at = (segment.queries.stop - at) // segment.rows, segment.queries.stop
            low, high, _ = segment.keys.indices(slots)
            for row in range(segment.rows):
                queries.append(queries[-1] + count)
                starts.append(low + row * segment.key_stride)
                used.append(high - low)
        return cls(
            torch.tensor(queries, dtype=torch.int32, device=device),
            torch.tensor([*starts, slots], dtype=torch.int32, device=device),
            max(b - a for a, b in pairwise(queries)), max(used),
            used=torch.tensor(used, dtype=torch.int32, device=device),
        )  # fmt: skip


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
