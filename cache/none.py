"""No cache: the reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..canvas import Canvas, IntArray
from ..capabilities import COMMITTED_LOGITS, REORDERING, SHADOW, WHOLE_TEXT
from .base import REGION, Cache, Plan, Slots, full_plan, register


@register("none")
@dataclass(frozen=True)
class NoCache(Cache):
    """Recompute every position in every step: exact."""

    offers = REGION | {COMMITTED_LOGITS, REORDERING, SHADOW, WHOLE_TEXT}
    stores = False

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        if not slots.block_length:
            return full_plan(canvas)
        # What lies behind the last block that is asked about is seen by nobody.
        end = (int(targets[-1]) // slots.block_length + 1) * slots.block_length
        return Plan(np.arange(min(end, canvas.length)), refresh=True)
