"""Where positions may be committed: blocks from left to right, or the whole region at once."""

from ..core.canvas import Canvas
from ..core.capabilities import FIXED_WINDOW, REPEATABLE
from ..core.limits import COUNT, bounds
from .base import Window
from .compose import register


@register("blocks", paper="Large Language Diffusion Models", arxiv="2502.09992")
class StaticBlocks(Window):
    """Blocks of equal length, left to right; the next opens when the last has no mask.

    The last block is short when ``block_length`` (default 32) does not divide the region.
    """

    offers = frozenset({FIXED_WINDOW, REPEATABLE})
    limits = bounds(block_length=COUNT)

    block_length: int | None = None

    def advance(self, canvas: Canvas) -> None:
        low, high = canvas.window
        size = self.block_length or 32
        origin = canvas.start if canvas.origin is None else canvas.origin
        if low < high < canvas.end:  # a block that was short gets longer with its region
            high = min(origin + -(-(high - origin) // size) * size, canvas.end)
            canvas.window = low, high
        while not canvas.masked[low:high].any() and high < canvas.end:
            low, high = high, min(origin + ((high - origin) // size + 1) * size, canvas.end)
        if (low, high) != canvas.window:
            canvas.open_window(low, high)


@register("whole", paper="Dream 7B", arxiv="2508.15487")
class WholeRegion(Window):
    """Every undecided position of the region, from the first step on."""

    offers = frozenset({FIXED_WINDOW, REPEATABLE})

    def advance(self, canvas: Canvas) -> None:
        if canvas.window != (canvas.start, canvas.end):
            canvas.window = (canvas.start, canvas.end)
            canvas.block = 0
