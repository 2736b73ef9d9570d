"""DCD's cache: the sliding window and a margin around it."""

from dataclasses import dataclass

from ..core.canvas import Canvas, IntArray
from ..core.limits import NOT_NEGATIVE, bounds, one_of
from .base import ALL, Plan, Refreshing, Slots, full_plan, register, span


@dataclass(slots=True)
class Edge:
    """Where the window of the previous step began; None before the first."""

    low: int | None = None


@register(
    "dcd", paper="Deferred Commitment Decoding for Diffusion Language Models", arxiv="2601.02076"
)
class DCDCache(Refreshing):
    """Recompute the window, what it has just left behind, and ``delay`` positions on either side.

    The range begins ``delay`` (2 as in the released runs) positions left of where the window began
    in the step before, but not in the prompt, and ends as many right of the window; ``mode``
    "prefix" goes on to the end of the row ("dual" is the default).  Everything is refreshed after
    ``refresh_after`` commits (their ``refresh_count``, 16 or 32), padding behind an end of text
    counted, and where blocks do not slide, when one opens.  ``delay`` 0: from the window on.

    ``lookahead`` (default): where logits are shifted, the last position of the range is computed
    too, although it predicts nothing in it.
    """

    offers = ALL
    by_block = True
    limits = bounds(delay=NOT_NEGATIVE, mode=one_of(("dual", "prefix")))

    refresh_after: float | None = 32
    delay: int = 2
    mode: str = "dual"
    lookahead: bool = True

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        (low, high), edge = canvas.window, slots.state(Edge)
        before, edge.low = edge.low, low
        if self.due(canvas, slots) or before is None:
            return full_plan(canvas)
        if self.delay:
            low = min(low, max(before - self.delay, canvas.start))
        high = min(high + self.delay, canvas.length) if self.mode == "dual" else canvas.length
        last = high if self.lookahead else high - slots.shift
        return Plan(span(canvas, low - slots.shift, last))
