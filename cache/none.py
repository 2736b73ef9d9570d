"""No cache: the reference."""

from __future__ import annotations

from dataclasses import dataclass

from ..canvas import Canvas, IntArray
from ..capabilities import BRANCHES, COMMITTED_LOGITS, REGION_LOGITS, SHADOW, WINDOW_LOGITS
from .base import Cache, Plan, Slots, everything, register


@register("none")
@dataclass(frozen=True)
class NoCache(Cache):
    """Recompute every position in every step: exact."""

    stores = False
    offers = frozenset({REGION_LOGITS, WINDOW_LOGITS, COMMITTED_LOGITS, BRANCHES, SHADOW})

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        return everything(canvas)
