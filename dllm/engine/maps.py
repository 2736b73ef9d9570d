"""Attention maps for samplers that read them: recomputed beside the attention of some layers.

Fused attention gives no weights, so that those of the wanted layers are computed a second time from
the same queries and keys.  Only rows whose sampler asks pay, and only where nothing is cached.
"""

from typing import Any

import torch
from torch import Tensor

from .packing import Packed
from .rows import Job
from .visibility import Visibility


class AttentionMaps:
    """Sums of the attention of one forward, (L, L) for each job that wants some."""

    def __init__(self, packed: Packed, visibility: Visibility) -> None:
        self._sums: dict[int, Tensor] = {}
        self._visibility = visibility
        self._wanted: list[tuple[Job, slice, tuple[int, ...]]] = []
        at = 0
        for job, lane in packed.lanes:
            count = len(job.plan.compute)
            if lane == 0 and job.row.options.maps:
                self._wanted.append((job, slice(at, at + count), job.row.options.maps))
            at += count + len(job.masks)

    def watch(self, module: Any, q: Tensor, k: Tensor) -> None:
        """Called by the attention of every layer with (1, H, Q, dh) and (1, Hkv, Q, dh)."""
        for job, rows, layers in self._wanted:
            if module.layer_idx not in layers:
                continue
            queries, keys = q[0, :, rows].float(), k[0, :, rows].float()
            keys = keys.repeat_interleave(len(queries) // len(keys), dim=0)
            scores = queries @ keys.transpose(1, 2) * module.scaling
            if not self._visibility.full:
                at = job.plan.compute
                sliding = self._visibility.window is not None and module.is_sliding
                hidden = torch.from_numpy(self._visibility.unseen(job.canvas, at, at, sliding))
                scores.masked_fill_(hidden.to(q.device), -torch.inf)
            weights = scores.softmax(-1).mean(0) / len(layers)
            known = self._sums.get(id(job))
            self._sums[id(job)] = weights if known is None else known + weights

    def of_job(self, job: Job) -> dict[str, Tensor]:
        """ "attention", (L, L) float32, where the job wants some."""
        known = self._sums.get(id(job))
        return {} if known is None else {"attention": known}
