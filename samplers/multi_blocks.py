"""Several blocks open at once."""

from dataclasses import dataclass

from ..core.canvas import Canvas
from ..core.capabilities import REPEATABLE
from ..core.limits import COUNT, NOT_NEGATIVE, bounds
from .base import Window
from .compose import register


@dataclass
class FirstBlock:
    """Where the first of several open blocks ends; None where there is only one."""

    end: int | None = None


BITS_TO_ROUNDS = "From Bits to Rounds: Parallel Decoding with Exploration for Diffusion LMs"


@register("multi_blocks", paper=BITS_TO_ROUNDS, arxiv="2511.21103")
class MultiBlocks(Window):
    """Several blocks at once: that of the first undecided position and ``lookahead`` (1) more.

    ``block_length`` (32).  The window moves on when its first block is decided.
    """

    offers = frozenset({REPEATABLE})
    limits = bounds(block_length=COUNT, lookahead=NOT_NEGATIVE)

    block_length: int | None = None
    lookahead: int = 1

    def advance(self, canvas: Canvas) -> None:
        size = self.block_length or 32
        low, high = canvas.block_at(canvas.frontier(), size)
        window = (max(low, canvas.start), min(high + size * self.lookahead, canvas.end))
        canvas.state(FirstBlock).end = high
        if window != canvas.window:
            canvas.open_window(*window)
