"""No cache: the reference."""

from __future__ import annotations

from dataclasses import dataclass

from ..canvas import Canvas, IntArray
from ..capabilities import ATTENTION_MAPS, COMMITTED_LOGITS, REORDERING, SHADOW
from .base import REGION, Cache, Plan, Slots, full_plan, register


@register("none")
@dataclass(frozen=True)
class NoCache(Cache):
    """Recompute every position in every step: exact."""

    offers = REGION | {ATTENTION_MAPS, COMMITTED_LOGITS, REORDERING, SHADOW}
    stores = False

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        return full_plan(canvas)
