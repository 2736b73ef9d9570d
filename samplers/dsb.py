"""Dynamic Sliding Block: a block whose right edge advances with every commit."""

from __future__ import annotations

from dataclasses import dataclass

from ..canvas import Canvas
from ..capabilities import REPEATABLE
from ..limits import COUNT, within
from .base import Window
from .compose import register
from .dcd import slide


@register(
    "dsb",
    paper="DSB: Dynamic Sliding Block Scheduling for Diffusion LLMs",
    arxiv="2602.05992",
)
@dataclass(frozen=True)
class DSB(Window):
    """A block whose right edge advances by one for every decided position.

    ``block_length`` (32) positions are open at first, and the right edge lies ``block_length`` plus
    the number of decided positions behind the start of the region ("greedy").  ``k_max`` also
    limits the width counted from the first undecided position ("const"; ``block_length`` in the
    published runs).

    Steps in which its cache recomputes everything commit like all others; the released code of
    Dream commits exactly the first undecided position there.
    """

    offers = frozenset({REPEATABLE})
    limits = within(block_length=COUNT, k_max=COUNT)

    block_length: int | None = None
    k_max: int | None = None

    def advance(self, canvas: Canvas) -> None:
        open_ = canvas.masked[canvas.start : canvas.end]
        if not open_.any():
            return
        low = canvas.start + int(open_.argmax())
        high = canvas.start + (self.block_length or 32) + int((~open_).sum())
        if self.k_max is not None:
            high = min(high, low + self.k_max)
        slide(canvas, low, min(high, canvas.end))
