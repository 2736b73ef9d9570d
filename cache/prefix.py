"""Fast-dLLM's prefix cache: freeze what lies left of the open block.

As in `dual`, everything is recomputed when a block opens; the predictions of that refresh are used
like any other step's, and it repairs the slots of the previous block's last commits.
"""

import numpy as np

from ..core.canvas import Canvas, IntArray
from .base import ALL, Plan, Refreshing, Slots, register

FAST_DLLM = "Fast-dLLM: Training-free Acceleration of Diffusion LLM"


@register("prefix", paper=FAST_DLLM, arxiv="2505.22618")
class PrefixCache(Refreshing):
    """Freeze everything left of the open block; recompute from its start to the end."""

    offers = ALL
    by_block = True

    def between(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        return Plan(np.arange(canvas.window[0], canvas.length), until=self.holds)
