"""DSB's cache: the sliding window and a margin on its left."""

from __future__ import annotations

import numpy as np

from ..core.canvas import Canvas, Fed, IntArray
from ..core.capabilities import DSB_CACHE, Capability
from ..core.limits import NOT_NEGATIVE, bounds
from .base import BLOCK, Plan, Slots, full_plan, register
from .refresh import Refreshing
from .sliding import Edge, span


@register(
    "dsb", paper="DSB: Dynamic Sliding Block Scheduling for Diffusion LLMs", arxiv="2602.05992"
)
class DSBCache(Refreshing):
    """Recompute the window and ``before`` positions left of it, or as many as it has moved past.

    ``before`` 24 and ``after`` 0 as released; everything is refreshed after ``refresh_after``
    commits, a block length in the paper.  ``official`` feeds what the released code does, which its
    window knows: ``sampler="dsb(official=True, before=24, after=0)"``; where logits are shifted,
    the first position of what is fed is predicted from its own row.
    """

    limits = bounds(before=NOT_NEGATIVE, after=NOT_NEGATIVE)

    refresh_after: float | None = 32
    before: int = 24
    after: int = 0
    official: bool = False

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        return frozenset({DSB_CACHE} if self.official else ())

    @property
    def offers(self) -> frozenset[Capability]:  # type: ignore[override]
        return BLOCK | {DSB_CACHE} if self.official else BLOCK

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        if self.official:
            fed = canvas.state(Fed)
            return full_plan(canvas) if fed.whole else Plan(
                np.arange(fed.first, fed.end), floor=fed.first
            )  # fmt: skip
        low, high = canvas.window
        edge = slots.state(Edge)
        moved = 0 if edge.low is None else low - edge.low
        edge.low = low
        if self.due(canvas, slots):
            return full_plan(canvas)
        return Plan(span(canvas, low - max(moved, self.before), high + self.after))
