"""Fast-dLLM's prefix and dual cache: freeze what lies outside the open block.

Both recompute everything when a block opens; the predictions of that refresh are used like any
other step's, and it repairs the slots of the previous block's last commits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..canvas import Canvas, IntArray
from ..capabilities import COMMITTED_LOGITS
from .base import REGION, Plan, Slots, full_plan, register
from .refresh import Refreshing

FAST_DLLM = "Fast-dLLM: Training-free Acceleration of Diffusion LLM"


@dataclass(frozen=True)
class BlockCache(Refreshing):
    """Shared by both: besides every block opening, refresh on the clock or after some commits."""

    by_block = True

    def first_to_last(self, canvas: Canvas) -> tuple[int, int]:
        """Positions recomputed between refreshes."""
        raise NotImplementedError

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        if self.due(canvas, slots):
            return full_plan(canvas)
        return Plan(np.arange(*self.first_to_last(canvas)))


@register("prefix", paper=FAST_DLLM, arxiv="2505.22618")
@dataclass(frozen=True)
class PrefixCache(BlockCache):
    """Freeze everything left of the open block; recompute from its start to the end."""

    offers = REGION | {COMMITTED_LOGITS}

    def first_to_last(self, canvas: Canvas) -> tuple[int, int]:
        return canvas.window[0], canvas.length
