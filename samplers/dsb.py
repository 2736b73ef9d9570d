"""Dynamic Sliding Block: a block whose right edge advances with every commit."""

from ..core.canvas import Canvas
from ..core.capabilities import REPEATABLE
from ..core.limits import COUNT, bounds
from .base import Window
from .compose import register
from .dcd import slide


@register(
    "dsb", paper="DSB: Dynamic Sliding Block Scheduling for Diffusion LLMs", arxiv="2602.05992"
)
class DSB(Window):
    """A block whose right edge advances by one for every decided position.

    ``block_length`` (32) positions are open at first, and the right edge lies ``block_length`` plus
    the number of decided positions behind the start of the region ("greedy").  ``k_max`` also
    limits the width counted from the first undecided position ("const").
    """

    offers = frozenset({REPEATABLE})
    limits = bounds(block_length=COUNT, k_max=COUNT)

    block_length: int | None = None
    k_max: int | None = None

    def advance(self, canvas: Canvas) -> None:
        low = canvas.frontier()
        slide(canvas, low, self._edge(canvas, low))

    def _edge(self, canvas: Canvas, low: int) -> int:
        """Where a block that begins at ``low`` ends."""
        decided = ~canvas.masked[canvas.start : canvas.end]
        high = canvas.start + (self.block_length or 32) + int(decided.sum())
        high = high if self.k_max is None else min(high, low + self.k_max)
        return min(high, canvas.end)
