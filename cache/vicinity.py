"""dInfer's vicinity cache: the open block and its neighbourhood."""

from ..core.canvas import Canvas, IntArray
from ..core.limits import NOT_NEGATIVE, bounds
from .base import ALL, Plan, Refreshing, Slots, full_plan, register, span


@register(
    "vicinity",
    paper="dInfer: An Efficient Inference Framework for Diffusion Language Models",
    arxiv="2510.08666",
)
class VicinityCache(Refreshing):
    """Recompute the block and its neighbourhood: ``before`` positions left, ``after`` right of it.

    The keys and values of tokens near the block change most.  Everything is recomputed when a
    block opens and in the first ``warmup`` steps; 16, 16 and 4 as released.
    """

    offers = ALL
    by_block = True
    limits = bounds(before=NOT_NEGATIVE, after=NOT_NEGATIVE, warmup=NOT_NEGATIVE)

    before: int = 16
    after: int = 16
    warmup: int = 4

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        if self.due(canvas, slots) or canvas.nfe <= self.warmup:
            return full_plan(canvas)
        low, high = canvas.window
        return Plan(span(canvas, low - slots.shift - self.before, high + self.after))
