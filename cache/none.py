"""No cache: the reference."""

from dataclasses import replace

import numpy as np

from ..core.canvas import Canvas, IntArray
from ..core.capabilities import BLOCK_CAUSAL, DECIDED_FIRST, WHOLE_TEXT
from .base import ALL, SAME_LENGTH, Cache, Plan, Slots, full_plan, register


@register("none")
class NoCache(Cache):
    """Recompute every position in every step, but for those that nobody sees: exact."""

    offers = ALL | {BLOCK_CAUSAL, DECIDED_FIRST, WHOLE_TEXT}
    stores = False

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        # What lies behind the last block, or mask, that is asked about is seen by nobody.
        if slots.decided_first:
            decided = np.flatnonzero(~canvas.masked[: canvas.length])
            end = int(max(targets[-1], decided[-1] if decided.size else 0)) + 1
        elif slots.block_length:
            end = slots.end(canvas, targets)
        else:
            return replace(full_plan(canvas), until=SAME_LENGTH)
        return Plan(np.arange(min(end, canvas.length)), refresh=True)
