"""DSB's cache: the sliding window and a margin on its left."""

from ..core.canvas import Canvas, IntArray
from ..core.limits import NOT_NEGATIVE, bounds
from .base import ALL, Plan, Refreshing, Slots, full_plan, register, span
from .dcd import Edge


@register(
    "dsb", paper="DSB: Dynamic Sliding Block Scheduling for Diffusion LLMs", arxiv="2602.05992"
)
class DSBCache(Refreshing):
    """Recompute the window and ``before`` positions left of it, or as many as it has moved past.

    ``before`` 24 and ``after`` 0 as released; everything is refreshed after ``refresh_after``
    commits, a block length in the paper.
    """

    offers = ALL
    limits = bounds(before=NOT_NEGATIVE, after=NOT_NEGATIVE)

    refresh_after: float | None = 32
    before: int = 24
    after: int = 0

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        low, high = canvas.window
        edge = slots.state(Edge)
        moved = 0 if edge.low is None else low - edge.low
        edge.low = low
        if self.due(canvas, slots):
            return full_plan(canvas)
        return Plan(span(canvas, low - max(moved, self.before), high + self.after))
