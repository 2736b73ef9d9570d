"""Fast-dLLM's dual cache: freeze everything outside the open block."""

import numpy as np

from ..core.canvas import Canvas, IntArray
from .base import ALL, Plan, Refreshing, Slots, register
from .prefix import FAST_DLLM


@register("dual", paper=FAST_DLLM, arxiv="2505.22618")
class DualCache(Refreshing):
    """Freeze everything outside the open block; recompute the block alone."""

    offers = ALL
    by_block = True

    def between(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        return Plan(np.arange(*canvas.window), until=self.holds)
