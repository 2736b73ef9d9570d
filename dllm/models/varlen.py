"""All rows of a packed step in one call of FlashAttention's variable-length kernel.

The kernel wants queries and keys of all rows end to end and the borders between them.  Queries are
packed that way already; keys are gathered from the buffer, unless they lie end to end too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Borders:
    """``queries``, ``keys`` (rows + 1,) int32 are running sums of lengths; ``index`` (K,) int64
    names the keys of all rows, None where they are the whole key axis in order."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    index: Tensor | None

    @classmethod
    def of(cls, segments: Sequence[Any], slots: int, device: torch.device) -> Borders | None:
        """Of `attention.Segment`s over ``slots`` keys; None where their queries leave gaps."""
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


class Varlen:
    """Attends packed rows with the kernel of ``package``, imported at the first call."""

    def __init__(self, package: str, kernel: Kernel | None = None) -> None:
        self.package, self._kernel = package, kernel
        self._last: tuple[Sequence[Any], int, Borders | None] | None = None

    def borders(self, segments: Sequence[Any], slots: int, device: torch.device) -> Borders | None:
        """The same for every layer of a step: worked out at the first."""
        last = self._last
        if last is None or last[0] is not segments or last[1] != slots:
            last = self._last = (segments, slots, Borders.of(segments, slots, device))
        return last[2]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Any], scaling: float | None
    ) -> Tensor | None:
        """(1, Q, H, dh), or None for segments that have to be called one by one.

        ``q`` (1, H, Q, dh), ``k``, ``v`` (1, Hkv, S, dh).
        """
        borders = self.borders(segments, k.shape[2], k.device)
        if borders is None or int(segments[-1].queries.stop) != q.shape[2]:
            return None
        if self._kernel is None:
            kernel: Kernel = import_module(self.package).flash_attn_varlen_func
            self._kernel = kernel
        keys, values = k[0].transpose(0, 1), v[0].transpose(0, 1)
        if borders.index is not None:
            keys, values = keys[borders.index], values[borders.index]
        result = self._kernel(
            q[0].transpose(0, 1).contiguous(), keys.contiguous(), values.contiguous(),
            cu_seqlens_q=borders.queries, cu_seqlens_k=borders.keys,
            max_seqlen_q=borders.most_queries, max_seqlen_k=borders.most_keys,
            softmax_scale=scaling, causal=False,
        )  # fmt: skip
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out[None]
